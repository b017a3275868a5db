"""From parents to devices: one for each mediated device that was made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backends.base import NUMBER, TEXT, Attribute, Device, Discovery, Host, HostPath, Node, Problem
from backends.linux import pci, sysfs
from backends.mdev import parents
from backends.mdev.parents import Type

NODES: Final = HostPath("/dev/vfio")

ATTRIBUTES: Final = {
    "uuid": Attribute("a UUID in lower case, as in '4b20d080-1b54-4048-85b3-a6a62d165c01'", parents.UUID.pattern),
    "type": TEXT,
    "type_name": TEXT,
    "type_id": TEXT,
    "parent": TEXT,
    "numa_node": NUMBER,
    "iommu_group": NUMBER,
}

_PERMISSIONS: Final = "mrw"  # KubeVirt's


def find(host: Host, parent: str) -> Discovery:
    """The devices that were made of a parent."""
    path = parents.of(host, parent)
    if path is None:
        return Discovery()
    devices, problems = [], []
    for uuid in parents.made(host, path):
        if (kind := parents.type_of(host, path / uuid)) is None:
            why = f"mediated device {uuid} of {parent} has no type: the link mdev_type in {path / uuid} cannot be read"
            problems.append(Problem(uuid, why))
        else:
            devices.append(device(host, path, uuid, kind))
    return Discovery(tuple(devices), problems=tuple(problems))


def device(host: Host, parent: HostPath, uuid: str, kind: Type) -> Device:
    """One that was made."""
    group = sysfs.linked_name(host, parent / uuid / "iommu_group")
    numa_node = sysfs.numa_node(host, parent)
    attributes = {
        "uuid": uuid,
        "type_name": kind.name,
        "type_id": kind.id,
        "parent": parent.name,
        "numa_node": None if numa_node is None else str(numa_node),
        "iommu_group": group,
    }
    return Device(
        key=uuid,
        unit=parent.name,
        hardware=frozenset({f"mdev:{uuid}"}),
        depends=frozenset(f"pci:{address}" for address in functions(host, parent)),
        identity=f"{parent.name} {kind.id}",
        nodes=()
        if group is None
        else tuple(Node(NODES / name, f"{NODES}/{name}", _PERMISSIONS) for name in ("vfio", group)),
        numa_node=numa_node,
        ancestry=pci.ancestry(parent / uuid),
        unusable="" if group is not None else "it is in no IOMMU group: no vfio driver has it (yet)",
        attributes={name: (value,) for name, value in attributes.items() if value} | {"type": _called(kind)},
    )


def functions(host: Host, parent: HostPath) -> Iterator[str]:
    """The PCI function that a parent is, and of a virtual one the physical one; none of any other device."""
    if pci.ADDRESS.fullmatch(parent.name):
        yield parent.name
        if (physical := sysfs.linked_name(host, parent / "physfn")) is not None and pci.ADDRESS.fullmatch(physical):
            yield physical


def _called(kind: Type) -> tuple[str, ...]:
    """All that a selector may call a type: with `_` or with spaces, or by its ID."""
    return tuple(dict.fromkeys((kind.name, kind.name.replace("_", " "), kind.id)))
