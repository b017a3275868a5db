"""The backend `mdev`: its units are parents, its devices are for virtual machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from msgspec.structs import replace

from backends.base import (
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
from backends.linux.kernel import Kernel
from backends.mdev import devices, parents
from backends.mdev.creation import Maker
from backends.mdev.options import MdevOptions, MdevResource, complaints


class Mdev(Backend[MdevOptions]):
    """Hands out mediated devices. Units are their parents, by name: `0000:3b:00.0`, `matrix`, `mtty`."""

    options_type: ClassVar = MdevOptions
    attributes: ClassVar = devices.ATTRIBUTES
    complaints: ClassVar = staticmethod(complaints)

    def __init__(self, host: Host, resources: Sequence[MdevResource], kernel: Kernel | None = None) -> None:
        super().__init__(host, resources)
        self._maker = Maker(host, kernel or Kernel(host))

    # --- what is there ---

    def units(self) -> Iterable[str]:
        """The parents."""
        return parents.every(self.host)

    def discover(self, unit: str) -> Discovery:
        """The devices that were made of a parent, and those that could be made for a pod."""
        return devices.find(self.host, self.resources, unit)

    def probe(self, device: Device) -> Iterator[Signal]:
        """The health of its nodes and of its parent."""
        if device.unusable:
            return
        yield from super().probe(device)
        if pci.ADDRESS.fullmatch(device.unit):
            yield from pci_health.signals(self.host, device.unit)

    def signals(self, record: Record) -> Iterable[Signal]:
        """PCI error recoveries, of any function: it may be a parent, or the physical function of one."""
        return pci_health.recovery_signals(record)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """Events of mediated devices, of parents on the PCI bus and of nodes of vfio."""
        return Watches(
            frozenset({"mdev", "pci", "vfio"}),
            directories=frozenset({iommu.NODES}),
            facts=frozenset({pci_health.FACT}),
        )

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:
        """The parents that an event is about, or depend on its function, or have a device with its node."""
        if isinstance(hint, PathChange):
            return known.having_node(hint.path)
        if not isinstance(hint, Uevent):
            return ()
        if hint.subsystem == "mdev":
            return (hint.devpath.split("/")[-2],)
        if hint.subsystem == "vfio":
            return known.having_node(hint.node) if hint.node else ()
        registered = (hint.name,) if "MDEV_STATE" in hint.properties else ()  # mdev_register_parent tells this way
        return {*registered, *known.minding(f"pci:{pci.address_in(hint.devpath)}")}

    # --- what a pod gets ---

    def prefers(self, resource: MdevResource) -> bool:  # noqa: ARG002
        """Always: the speed of a virtual machine depends on which parents its devices are on."""
        return True

    def edits(self, resource: MdevResource, grants: Sequence[Grant]) -> ContainerEdits:
        """The groups' nodes, and KubeVirt's variable with one UUID for each ID.

        Raises:
            AllocationRefused: one of them is gone since it was made.
        """
        for grant in grants:
            if not grant.device.nodes:
                raise AllocationRefused(
                    f"{grant.id} of {resource.name} has no node at the moment. Create the pod again."
                )
        uuids = ",".join(grant.device.key for grant in grants)
        return replace(ContainerEdits.of(grants), env={resource.variable("MDEV_PCI_RESOURCE"): uuids})

    def needs_claim(self, resource: MdevResource) -> bool:
        """Only for resources with `create`."""
        return resource.spec.options.create

    def claim(self, resource: MdevResource, grants: Sequence[Grant]) -> None:
        """Make the devices that are not there yet.

        Raises:
            AllocationRefused: one cannot be made; none is then.
        """
        try:
            self._maker.make(grant.device for grant in grants)
        except NotReady as error:
            ids = ", ".join(grant.id for grant in grants)
            raise AllocationRefused(
                f"{ids} of {resource.name} cannot be made ready: {error}. Create the pod again."
            ) from error

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:  # noqa: ARG002
        """Remove devices of ours that nobody holds any more, whatever the configuration says by now."""
        uuids = (hardware.removeprefix("mdev:") for hardware in sorted(idle))
        each(self._maker.remove, uuids, NotReady, "not removed")
