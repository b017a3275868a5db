"""The backend `vfio`: its units are IOMMU groups; it binds drivers and hands out nodes of vfio."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from msgspec.structs import replace

from backends.base import (
    ALL,
    TEXT,
    All,
    AllocationRefused,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    Host,
    Known,
    NotReady,
    PathChange,
    Record,
    Released,
    Signal,
    Uevent,
    Watches,
)
from backends.errors import each
from backends.linux import iommu, pci, pci_health
from backends.linux.iommu import Group
from backends.linux.kernel import Kernel
from backends.vfio import devices, vgpu
from backends.vfio.binding import Binder, plan
from backends.vfio.options import VfioOptions, VfioResource, complaints
from backends.vfio.vgpu import VgpuTypes

_MOVING = frozenset({"add", "remove", "bind", "unbind"})


class Vfio(Backend[VfioOptions]):
    """Hands out IOMMU groups.

    Units are group numbers; a function that has no group, or one that vfio made up for it alone, is its own unit.
    """

    options_type: ClassVar = VfioOptions
    attributes: ClassVar = {**pci.ATTRIBUTES, "companions": TEXT}
    complaints: ClassVar = staticmethod(complaints)

    def __init__(self, host: Host, resources: Sequence[VfioResource], kernel: Kernel | None = None) -> None:
        super().__init__(host, resources)
        kernel = kernel or Kernel(host)
        self._binder, self._vgpu_types = Binder(host, kernel), VgpuTypes(host, kernel)

    # --- what is there ---

    def units(self) -> Iterable[str]:
        """Every group, and every function without one."""
        return iommu.units(self.host)

    def discover(self, unit: str) -> Discovery:
        """The group's devices, one for each resource that selects any of its functions."""
        return devices.find(self.host, self.resources, unit)

    def probe(self, device: Device) -> Iterator[Signal]:
        """Nothing about a device that cannot be used: its hardware may be that of another backend."""
        if device.unusable:
            return
        found = self._look(device)
        wanted = found[2].spec.options.vgpu_type if found is not None else None
        yield from vgpu.signals(self.host, device, devices.depends(device.unit), wanted)
        if found is not None:
            yield from devices.signals(self.host, device, *found)

    def signals(self, record: Record) -> Iterable[Signal]:
        """PCI error recoveries, of any function: it may be in any group, or the physical one of a virtual one."""
        return pci_health.recovery_signals(record)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """Events of functions and their drivers, and of nodes of vfio."""
        return Watches(
            frozenset({"pci", "vfio", "vfio-dev"}),
            directories=frozenset({iommu.NODES, devices.OWN_NODES}),
            facts=frozenset({pci_health.FACT}),
        )

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """The groups of the functions that an event is about.

        A function that belongs to no device may have joined any group, or have been a virtual one of any function: then
        all groups are scanned.
        """
        if isinstance(hint, PathChange):
            return known.having_node(hint.path)
        if not isinstance(hint, Uevent):
            return ()
        if hint.subsystem == "vfio":
            return (*known.having_node(hint.node), *({hint.name} & known.keys())) if hint.node else ()
        functions = pci.affected(hint, known)
        units = {unit for address in functions for unit in known.minding(f"pci:{address}")}
        if not units and hint.subsystem == "pci" and hint.action in _MOVING:
            return ALL
        return units | {unit for address in pci.undivided(hint, known) for unit in _having(known, f"pci:{address}")}

    def _look(self, device: Device) -> tuple[Group, Sequence[pci.Function], VfioResource] | None:
        """The group as it is now, which functions of it the resource wants, and the resource; None if it is gone."""
        group = iommu.read(self.host, device.unit)
        if group is None or device.resource is None:
            return None
        resource = self.resource(device.resource)
        functions = devices.selected(resource, group)
        return (group, functions, resource) if functions else None

    # --- what a pod gets ---

    def ids(self, resource: VfioResource, device: Device) -> Sequence[str]:
        """The device's address, or its group's number."""
        return [device.unit if resource.spec.options.ids == "group" else device.key]

    def prefers(self, resource: VfioResource) -> bool:  # noqa: ARG002
        """Always: the speed of a virtual machine depends on which functions it has together."""
        return True

    def edits(self, resource: VfioResource, grants: Sequence[Grant]) -> ContainerEdits:
        """The groups' nodes, and KubeVirt's variable with one address for each ID.

        Addresses are in the order of the IDs: the order in which the kubelet asks means nothing (A4). Companions are not
        named: virt-launcher would take the sound function of a GPU for a second GPU.

        Raises:
            AllocationRefused: one of them is on no vfio driver.
        """
        for grant in grants:
            if not grant.device.nodes:
                raise AllocationRefused(
                    f"{grant.id} of {resource.name} is on no vfio driver at the moment. Create the pod again."
                )
        addresses = ",".join(dict.fromkeys(grant.device.key for grant in grants))
        return replace(ContainerEdits.of(grants), env={resource.variable("PCI_RESOURCE"): addresses})

    def claim(self, resource: VfioResource, grants: Sequence[Grant]) -> None:
        """Bind what is to be bound, and check that each group can be opened."""
        for grant in grants:
            try:
                self._make_ready(resource, grant.device)
            except NotReady as error:
                raise AllocationRefused(
                    f"{grant.id} of {resource.name} cannot be made ready: {error}. Create the pod again; if it happens "
                    "again, this node's administrator must look at the device."
                ) from error

    def adopts(self, resource: VfioResource) -> bool:
        """Only for resources with `bind = "start"`."""
        return resource.spec.options.bind == "start"

    def adopt(self, resource: VfioResource, device: Device) -> bool:
        """Bind a device that has joined the resource."""
        return self._make_ready(resource, device)

    def _make_ready(self, resource: VfioResource, device: Device) -> bool:
        """Bind what the options permit, and check the outcome; returns whether anything was bound."""
        options, since = resource.spec.options, time.time()
        group, functions = self._current(resource, device)
        planned = plan(self.host, group, functions, resource)
        if why := planned.refusal or planned.obstacle:
            raise NotReady(why)
        give_back = options.release == "restore"
        self._binder.bind(planned.bind, resource, give_back=give_back)
        given = [
            function.address
            for function in functions
            if options.vgpu_type is not None and self._vgpu_types.give(function.address, options.vgpu_type)
        ]
        if planned.bind or given:
            group, functions = self._current(resource, device)
        if not iommu.is_vfio(functions[0]):
            raise NotReady(f"{device.key} is on no vfio driver")
        nodes = tuple(devices.nodes(self.host, group, functions, options.iommu))
        self._binder.settle(nodes, since if planned.bind or given else 0.0)
        return bool(planned.bind)

    def _current(self, resource: VfioResource, device: Device) -> tuple[Group, Sequence[pci.Function]]:
        group = iommu.read(self.host, device.unit)
        functions = devices.selected(resource, group) if group is not None else []
        if group is None or not functions or functions[0].address != device.key:
            raise NotReady(f"{device.key} is gone, or in another group now")
        return group, functions

    def prepare(self, resource: VfioResource, grants: Sequence[Grant]) -> Iterable[str]:
        """Reset each selected function, and those of its companions that can be reset alone.

        Raises:
            AllocationRefused: one that was asked for cannot be reset, or is on no vfio driver any more.
        """
        return [hardware for grant in grants for hardware in self._reset(resource, grant)]

    def _reset(self, resource: VfioResource, grant: Grant) -> Iterator[str]:
        group = iommu.read(self.host, grant.device.unit)
        if group is None:
            raise AllocationRefused(f"{grant.id} of {resource.name} is gone. Create the pod again.")
        asked = {function.address for function in devices.selected(resource, group)}
        for function in group.functions:
            if not iommu.is_vfio(function):
                if function.address in asked:
                    raise AllocationRefused(
                        f"{function.address} is to be reset before each use, but is on "
                        f"{function.driver or 'no driver'} and no longer on a vfio driver. Create the pod again."
                    )
                continue
            try:
                pci.reset(self.host, function.address)
            except AllocationRefused:
                if function.address in asked:
                    raise
            else:
                yield function.hardware

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:  # noqa: ARG002
        """Undo what we noted when we bound it or gave it a vGPU type, whatever the configuration says by now."""
        named = (hardware.removeprefix("pci:") for hardware in sorted(idle))
        each(self._restore, filter(pci.ADDRESS.fullmatch, named), NotReady, "not given back")

    def _restore(self, address: str) -> None:
        self._vgpu_types.take_back(address)
        self._binder.restore(address)


def _having(known: Known, hardware: str) -> list[str]:
    """The units with a device that owns this hardware; those that only depend on it are left out."""
    return [unit for unit in known.minding(hardware) if any(hardware in device.hardware for device in known[unit])]
