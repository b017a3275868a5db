"""The backend `mdev`: mediated devices (vGPUs and the like) for virtual machines, those there are and those that are made for a pod.

A unit is a parent: any device that can be divided, such as a PCI function (NVIDIA, i915), a virtual device (`mtty`), s390's
`matrix`. The UUID of a device of ours is computed from its parent, its type and a number, and so the same after a crash, a
reboot or the loss of all state. No note of what we made is needed, which could be lost before it is written.
Files: Documentation/driver-api/vfio-mediated-device.rst, Documentation/ABI/testing/sysfs-bus-vfio-mdev.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import ClassVar, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from backends.base import (
    NUMBER,
    TEXT,
    AllocationRefused,
    Attribute,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    Host,
    HostPath,
    Known,
    Node,
    NotReady,
    OptionsError,
    PathChange,
    Problem,
    Record,
    Released,
    Resource,
    Signal,
    Uevent,
    Watches,
)
from backends.errors import each, reason_of
from backends.linux import iommu, pci, pci_health, sysfs
from backends.linux.iommu import NODES
from backends.linux.kernel import GONE, Kernel, explained

MADE: Final = HostPath("/sys/bus/mdev/devices")
PARENTS: Final = HostPath("/sys/class/mdev_bus")
TYPES: Final = "mdev_supported_types"

UUID: Final = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""As the kernel names a mediated device (`%pUl` in drivers/vfio/mdev/mdev_core.c)."""

ATTRIBUTES: Final = {
    "uuid": Attribute("a UUID in lower case, as in '4b20d080-1b54-4048-85b3-a6a62d165c01'", UUID.pattern),
    "type": TEXT,
    "type_name": TEXT,
    "type_id": TEXT,
    "parent": TEXT,
    "numa_node": NUMBER,
    "iommu_group": NUMBER,
}

_PERMISSIONS: Final = "mrw"  # KubeVirt's


# --- the keys of a resource ---


_OF_TYPE: Final = {"type", "type_name", "type_id"}


class MdevOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of an `mdev` resource."""

    create: bool = False
    """Whether devices of the selected types are offered that do not exist yet: made for a pod, and removed after it."""


MdevResource = Resource[MdevOptions]


def complaints(resource: MdevResource) -> Iterator[OptionsError]:
    """What is wrong with a resource, key by key."""
    if resource.spec.replicas != 1:
        yield OptionsError(("replicas",), "is not for mdev: a device serves one virtual machine at a time")
    if not resource.spec.options.create:
        return
    if not resource.spec.select:
        yield OptionsError(("select",), 'must say what to create, as in select = { type = "GRID T4-1Q" }')
    for index, selector in enumerate(resource.spec.select):
        if not _OF_TYPE & selector.keys():
            yield OptionsError(("select", index), "names no type, and create would make devices of every type")
        for key in sorted({"uuid", "iommu_group"} & selector.keys()):
            yield OptionsError(("select", index, key), "is known of a device only once it has been made (see create)")


# --- the backend ---


class Mdev(Backend[MdevOptions]):
    """Hands out mediated devices. Units are their parents, by name: `0000:3b:00.0`, `matrix`, `mtty`."""

    options_type: ClassVar = MdevOptions
    attributes: ClassVar = ATTRIBUTES
    complaints: ClassVar = staticmethod(complaints)

    def __init__(self, host: Host, resources: Sequence[MdevResource], kernel: Kernel | None = None) -> None:
        super().__init__(host, resources)
        self._maker = Maker(host, kernel or Kernel(host))

    # --- what is there ---

    def units(self) -> Iterable[str]:
        """The parents."""
        return parents(self.host)

    def discover(self, unit: str) -> Discovery:
        """The devices that were made of a parent, and those that could be made for a pod."""
        path = path_of(self.host, unit)
        if path is None:
            return Discovery()
        depends = frozenset(f"pci:{address}" for address in functions(self.host, path))
        common = Device("", path.name, frozenset(), depends=depends, numa_node=sysfs.numa_node(self.host, path))
        devices, problems = [], []
        uuids = made(self.host, path)
        for one in uuids:
            if (kind := type_of(self.host, path / one)) is None:
                why = f"mediated device {one} of {unit} has no type: the link mdev_type in {path / one} cannot be read"
                problems.append(Problem(one, why))
                continue
            found = _device(path, common, one, kind, sysfs.linked_name(self.host, path / one / "iommu_group"))
            devices.append(_assigned(found, self.resources) if one in our_uuids(unit, kind.id) else found)
        makers = [resource for resource in self.resources if resource.spec.options.create]
        for kind in types_of(self.host, path) if makers else ():
            room = room_for(self.host, path, kind.id)
            for one in could_be_made(unit, kind.id, uuids, room):
                to_be = _assigned(_device(path, common, one, kind, None), makers)
                if to_be.resource is None:
                    break  # no resource wants this type
                devices.append(replace(to_be, unusable=""))
        return Discovery(tuple(devices), problems=tuple(problems))

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
        """Remove devices of ours that no pod holds any more, whatever the configuration says by now."""
        uuids = (hardware.removeprefix("mdev:") for hardware in sorted(idle))
        each(self._maker.remove, uuids, NotReady, "not removed")


# --- devices of a parent ---


def _assigned(device: Device, resources: Sequence[MdevResource]) -> Device:
    """The device, assigned to the first resource that would have it made."""
    takers = (r for r in resources if r.spec.options.create and r.refuses(device) is None)
    maker = next(takers, None)
    return device if maker is None else replace(device, resource=maker.name)


def _device(parent: HostPath, common: Device, uuid: str, kind: Type, group: str | None) -> Device:
    """The device with this UUID and type, made or not; `common` is what all devices of the parent have."""
    attributes = {
        "uuid": uuid,
        "type_name": kind.name,
        "type_id": kind.id,
        "parent": parent.name,
        "numa_node": None if common.numa_node is None else str(common.numa_node),
        "iommu_group": group,
    }
    return replace(
        common,
        key=uuid,
        hardware=frozenset({f"mdev:{uuid}"}),
        identity=f"{parent.name} {kind.id}",
        nodes=() if group is None else tuple(_node(name) for name in ("vfio", group)),
        ancestry=pci.ancestry(parent / uuid),
        unusable="" if group is not None else "it is in no IOMMU group: no vfio driver has it (yet)",
        attributes={name: (value,) for name, value in attributes.items() if value} | {"type": _type_names(kind)},
    )


def _node(name: str) -> Node:
    return Node(NODES / name, f"{NODES}/{name}", _PERMISSIONS)


def functions(host: Host, parent: HostPath) -> Iterator[str]:
    """The PCI function that a parent is, and its physical one if it is virtual; none for other parents."""
    if pci.ADDRESS.fullmatch(parent.name):
        yield parent.name
        if (physical := sysfs.linked_name(host, parent / "physfn")) is not None and pci.ADDRESS.fullmatch(physical):
            yield physical


def _type_names(kind: Type) -> tuple[str, ...]:
    """All that a selector may call a type: its name, with `_` or with spaces, or its ID."""
    return tuple(dict.fromkeys((kind.name, kind.name.replace("_", " "), kind.id)))


# --- what sysfs says of parents ---


class Type(Struct, frozen=True):
    """What a parent can be divided into."""

    id: str
    """The driver's own name for it: `nvidia-222`."""
    name: str
    """The driver's name with `_` for each space, as in KubeVirt (`GRID_T4-1Q`); the ID if it has no name."""


def parents(host: Host) -> dict[str, HostPath]:
    """Name → path of every parent.

    Raises:
        OSError: they cannot be listed.
    """
    links = [*(PARENTS / name for name in sysfs.entries(host, PARENTS))]
    found = {link.name: path for link in links if (path := sysfs.device(host, link)) is not None}
    for name in sysfs.entries(host, MADE):
        if (path := sysfs.device(host, MADE / name)) is not None:
            found.setdefault(path.parent.name, path.parent)
    return found


def path_of(host: Host, name: str) -> HostPath | None:
    """The path of one parent; None if there is none.

    Raises:
        OSError: they cannot be listed.
    """
    return sysfs.device(host, PARENTS / name) or parents(host).get(name)


def made(host: Host, parent: HostPath) -> list[str]:
    """The UUIDs of the devices that were made of a parent.

    Raises:
        OSError: they cannot be listed.
    """
    return [name for name in sysfs.entries(host, parent) if UUID.fullmatch(name)]


def types_of(host: Host, parent: HostPath) -> list[Type]:
    """What a parent can be divided into.

    Raises:
        OSError: they cannot be listed.
    """
    return [read_type(host, parent, kind) for kind in sysfs.entries(host, parent / TYPES)]


def room_for(host: Host, parent: HostPath, kind: str) -> int:
    """How many more of a type could be made of a parent now; it shrinks as others are made."""
    return max(sysfs.number(host, parent / TYPES / kind / "available_instances") or 0, 0)


def type_of(host: Host, device: HostPath) -> Type | None:
    """The type of a device that was made; None if it cannot be told."""
    kind = sysfs.linked_name(host, device / "mdev_type")
    return None if kind is None else read_type(host, device.parent, kind)


def read_type(host: Host, parent: HostPath, kind: str) -> Type:
    """One type of a parent, by its ID."""
    name = sysfs.attribute(host, parent / TYPES / kind / "name") or ""
    return Type(kind, name.replace(" ", "_") if name.isprintable() and name else kind)


# --- making and removing devices ---


MOST: Final = 256
"""The most devices of one type that are made of one parent: `vfio_ap` would allow 65,536."""

_OURS: Final = uuid.UUID("f7fa3a17-5b2e-4c0b-9d53-1d0f6e0c8a41")
_NODE_APPEARS: Final = 2.0  # seconds; devtmpfs has it at once, another /dev when its udev is done


@lru_cache(maxsize=1024)
def our_uuids(parent: str, kind: str) -> tuple[str, ...]:
    """The UUIDs of all devices that we may ever make of a parent (its name) with this type (its ID)."""
    return tuple(str(uuid.uuid5(_OURS, f"{parent} {kind} {number}")) for number in range(MOST))


def could_be_made(parent: str, kind: str, made: Iterable[str], available: int) -> list[str]:
    """The UUIDs of the devices that there is room for."""
    taken = frozenset(made)
    return [one for one in our_uuids(parent, kind) if one not in taken][:available]


class Maker:
    """Makes and removes devices on one host."""

    def __init__(self, host: Host, kernel: Kernel) -> None:
        self._host = host
        self._kernel = kernel

    def make(self, devices: Iterable[Device]) -> None:
        """Make those of these devices that are missing: all of them, or none.

        Raises:
            NotReady: one cannot be made; those that were made are removed again.
        """
        made: list[str] = []
        try:
            for device in devices:
                if self._path(device.key) is None:
                    made.append(device.key)
                    self._make(device)
                self._await_node(device.key)
        except NotReady:
            for one in made:
                with suppress(NotReady):  # the release removes it
                    self.remove(one)
            raise

    def remove(self, one: str) -> None:
        """Remove a device of ours; others' are left alone, and one that is gone is no error.

        Raises:
            NotReady: it is in use, or the kernel refuses.
        """
        path = self._path(one)
        kind = sysfs.linked_name(self._host, path / "mdev_type") if path is not None else None
        if path is None or kind is None or one not in our_uuids(path.parent.name, kind):
            return
        iommu.refuse_open(self._host, self._kernel, path, f"mediated device {one} is not removed")
        try:
            self._kernel.write(path / "remove", "1")
        except OSError as error:
            if error.errno not in GONE:
                raise NotReady(f"mediated device {one} cannot be removed: {reason_of(error)}") from error

    def _path(self, one: str) -> HostPath | None:
        return sysfs.device(self._host, MADE / one)

    def _make(self, device: Device) -> None:
        (kind,) = device.attributes["type_id"]
        parent = path_of(self._host, device.unit)
        if parent is None:
            raise NotReady(f"{device.unit} has no mediated devices any more")
        if not room_for(self._host, parent, kind):  # it shrinks when another type is made of the same parent
            raise NotReady(f"{device.unit} has no room for one more {kind} (available_instances is 0)")
        with explained(f"the kernel makes no {kind} of {device.unit}"):
            self._kernel.write(parent / TYPES / kind / "create", device.key)

    def _await_node(self, one: str) -> None:
        def is_there() -> bool:
            group = sysfs.linked_name(self._host, MADE / one / "iommu_group")
            return group is not None and self._host.local(iommu.NODES / group).exists()

        if not self._kernel.wait(is_there, _NODE_APPEARS):
            raise NotReady(f"mediated device {one} was made and has no node in {iommu.NODES}: is vfio_mdev loaded?")
