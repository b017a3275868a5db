"""Makes a device of each mediated device that exists, or that could be made for a pod."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from backends.base import NUMBER, TEXT, Attribute, Device, Discovery, Host, HostPath, Node, Problem
from backends.linux import pci, sysfs
from backends.linux.iommu import NODES
from backends.mdev import creation, parents
from backends.mdev.options import MdevResource
from backends.mdev.parents import Type

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


def find(host: Host, resources: Sequence[MdevResource], parent: str) -> Discovery:
    """The devices that were made of a parent, and those that could be made of it for a pod."""
    path = parents.of(host, parent)
    if path is None:
        return Discovery()
    depends = frozenset(f"pci:{address}" for address in functions(host, path))
    common = Device("", path.name, frozenset(), depends=depends, numa_node=sysfs.numa_node(host, path))
    devices, problems = [], []
    uuids = parents.made(host, path)
    for uuid in uuids:
        if (kind := parents.type_of(host, path / uuid)) is None:
            why = f"mediated device {uuid} of {parent} has no type: the link mdev_type in {path / uuid} cannot be read"
            problems.append(Problem(uuid, why))
            continue
        found = _device(path, common, uuid, kind, sysfs.linked_name(host, path / uuid / "iommu_group"))
        devices.append(_assigned(found, resources) if uuid in creation.uuids(parent, kind.id) else found)
    makers = [resource for resource in resources if resource.spec.options.create]
    for kind in parents.types(host, path) if makers else ():
        room = parents.available(host, path, kind.id)
        for uuid in creation.could_be_made(parent, kind.id, uuids, room):
            to_be = _assigned(_device(path, common, uuid, kind, None), makers)
            if to_be.resource is None:
                break  # no resource wants this type
            devices.append(replace(to_be, unusable=""))
    return Discovery(tuple(devices), problems=tuple(problems))


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
