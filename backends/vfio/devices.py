"""Makes a device of each IOMMU group, for each resource that selects any of its functions.

Selectors are matched with each function here, because a group is one device however many of its functions are selected, and
none if two resources want parts of it. The device has the name and the attributes of its first selected function; the
inventory matches the selectors with the device again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from backends.base import Device, Discovery, Host, HostPath, Node, Problem
from backends.linux import sysfs
from backends.linux.pci import functions as pci
from backends.linux.pci import iommu, reset
from backends.linux.pci.iommu import NODES, Group
from backends.vfio.binding_plan import plan
from backends.vfio.options import Iommu, VfioResource

OWN_NODES: Final = NODES / "devices"
IOMMUFD: Final = HostPath("/dev/iommu")

_PERMISSIONS: Final = "mrw"  # KubeVirt's
_NOIOMMU_ALLOWED: Final = HostPath("/sys/module/vfio/parameters/enable_unsafe_noiommu_mode")


def find(host: Host, resources: Iterable[VfioResource], unit: str) -> Discovery:
    """The devices of the group behind a unit."""
    group = iommu.read(host, unit)
    if group is None:
        return Discovery()
    wanted = {r.name: (r, functions) for r in resources if (functions := selected(r, group))}
    if not wanted:
        return _unselected(unit, group)
    split = _split(group, wanted.values())
    devices = tuple(
        replace(device, unusable=split) if split else device
        for resource, functions in wanted.values()
        for device in (_device(host, unit, group, resource, functions),)
    )
    problems = [problem for _, functions in wanted.values() for function in functions for problem in function.problems]
    if split:
        problems.append(Problem(group.name, split))
    return Discovery(devices, problems=tuple(dict.fromkeys(problems)))


def _unselected(unit: str, group: Group) -> Discovery:
    """Functions on a vfio driver that no resource selects; the inventory tells why of each.

    Others are not shown: most functions of a machine are among them.
    """
    hardware = frozenset(function.hardware for function in group.functions)
    first = next((function for function in group.functions if iommu.is_vfio(function)), None)
    every = {
        f: Device(f.address, unit, hardware, identity=f.ids, bindings=group.bindings, attributes=f.attributes())
        for f in group.functions
    }
    shown = () if first is None else (every.pop(first),)
    return Discovery(shown, beside=tuple(every.values()))


def selected(resource: VfioResource, group: Group) -> list[pci.Function]:
    """The functions of a group that a resource selects, by address."""
    return [function for function in group.functions if resource.refuses(function.as_device()) is None]


def depends(unit: str) -> str:
    """The hardware that signals about the group are about; another backend may have the functions themselves."""
    return f"iommu:{unit}"


def _split(group: Group, wanted: Iterable[tuple[VfioResource, Sequence[pci.Function]]]) -> str:
    """Why no resource can have the group, if several want different functions of it; empty if none do."""
    owner: dict[str, str] = {}
    wanted = list(wanted)
    if all(resource.spec.options.overlap for resource, _ in wanted):
        return ""
    for resource, functions in wanted:
        for function in functions:
            owner.setdefault(function.address, resource.name)
    if len(set(owner.values())) < 2:
        return ""
    parts = {name: [address for address, of in owner.items() if of == name] for name in dict.fromkeys(owner.values())}
    who = " and ".join(f"{name} ({', '.join(addresses)})" for name, addresses in parts.items())
    return f"{group.name} is split between {who}: it can only be had whole; let one of them select its functions"


def _device(host: Host, unit: str, group: Group, resource: VfioResource, functions: Sequence[pci.Function]) -> Device:
    first = functions[0]
    options = resource.spec.options
    others = tuple(function.address for function in group.functions if function is not first)
    unresettable = (reset.refusal(host, function) for function in functions)
    return Device(
        key=first.address,
        unit=unit,
        resource=resource.name,
        hardware=frozenset(function.hardware for function in (functions if options.overlap else group.functions)),
        depends=frozenset({depends(unit), *(f"pci:{f.physical}" for f in functions if f.physical is not None)}),
        identity=first.ids,
        bindings=group.bindings,
        nodes=tuple(nodes(host, group, functions, options.iommu)) if iommu.is_vfio(first) else (),
        numa_node=first.numa_node,
        ancestry=first.ancestry,
        unusable=_without_iommu(host, group) or plan(host, group, functions, options).refusal,
        no_reset=next(filter(None, unresettable), "") if resource.spec.pre_start == "reset" else "",
        attributes=first.attributes() | ({"companions": others} if others else {}),
    )


def _without_iommu(host: Host, group: Group) -> str:
    """Why a function without a group cannot be had; empty if vfio may make a group for it."""
    if group.number or sysfs.attribute(host, _NOIOMMU_ALLOWED) in ("Y", "1"):
        return ""
    return (
        "it is in no IOMMU group: turn the IOMMU on, in the firmware (VT-d, AMD-Vi) and on the kernel's command line "
        "(intel_iommu=on)"
    )


def nodes(host: Host, group: Group, functions: Sequence[pci.Function], mode: Iommu) -> Iterator[Node]:
    """The nodes of a group on a vfio driver, in KubeVirt's order; iommufd's own comes last."""
    if mode != "iommufd":
        yield _node(NODES / "vfio")
        yield _node(NODES / (f"noiommu-{group.number}" if group.is_noiommu else group.number))
    if mode == "legacy" or (mode == "both" and not has_own_nodes(host, functions)):
        return
    yield from (_node(OWN_NODES / name) for function in functions for name in function.vfio[:1])
    yield _node(IOMMUFD)


def has_own_nodes(host: Host, functions: Sequence[pci.Function]) -> bool:
    """Does the kernel make a node for each function (6.6 and newer, with CONFIG_VFIO_DEVICE_CDEV)?"""
    return host.local(IOMMUFD).exists() and all(
        function.vfio and sysfs.attribute(host, function.path / "vfio-dev" / function.vfio[0] / "dev") is not None
        for function in functions
    )


def _node(path: HostPath) -> Node:
    return Node(path, path.text, _PERMISSIONS)
