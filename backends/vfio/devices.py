"""Makes a device of each IOMMU group, for each resource that selects any of its functions; says how it is.

Selectors are matched with each function here, because a group is one device however many of its functions are selected. The
device has the name and the attributes of its first selected function; the inventory matches the selectors with the device
again, and gives the group to the first resource that wants a function of it. What else is selected goes with it: it is a
device of its own that is only shown.

Signals about the binding are about the group, which no other backend knows: a resource of another backend may have the same
function in another mode, and must not suffer. Signals about the function itself concern every backend.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Final

from msgspec.structs import replace

from backends.base import Device, Discovery, Host, HostPath, Node, Signal, Verdict
from backends.linux import iommu, pci, pci_health, sysfs
from backends.linux.iommu import NODES, Group
from backends.linux.nodes import missing
from backends.vfio.binding import Plan, card, plan
from backends.vfio.options import MODULE, Iommu, VfioOptions, VfioResource

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
    devices = [_device(host, unit, group, resource, functions) for resource, functions in wanted.values()]
    devices += _companions(unit, group, wanted.values())
    problems = [problem for _, functions in wanted.values() for function in functions for problem in function.problems]
    every = tuple(_plain(unit, group, function) for function in group.functions)
    return Discovery(tuple(devices), problems=tuple(dict.fromkeys(problems)), beside=every)


def _unselected(unit: str, group: Group) -> Discovery:
    """Functions on a vfio driver that no resource selects; the inventory tells why of each.

    Others are not shown: most functions of a machine are among them.
    """
    first = next((function for function in group.functions if iommu.is_vfio(function)), None)
    every = {function: _plain(unit, group, function) for function in group.functions}
    shown = () if first is None else (every.pop(first),)
    return Discovery(shown, beside=tuple(every.values()))


def _plain(unit: str, group: Group, function: pci.Function) -> Device:
    """A function as selectors see it."""
    hardware, attributes = frozenset(it.hardware for it in group.functions), _attributes(group, function)
    return Device(
        function.address, unit, hardware, identity=function.ids, bindings=group.bindings, attributes=attributes
    )


def _attributes(group: Group, function: pci.Function) -> dict[str, tuple[str, ...]]:
    """The attributes of a function of a group, its companions among them."""
    others = tuple(it.address for it in group.functions if it is not function)
    return function.attributes() | ({"companions": others} if others else {})


def _companions(
    unit: str, group: Group, wanted: Iterable[tuple[VfioResource, Sequence[pci.Function]]]
) -> Iterator[Device]:
    """The selected functions that go with another one: a user who selects two GPUs of a group learns where the second is.

    The other functions of a card, such as a GPU's sound, are expected to go with it.
    """
    wanted = list(wanted)
    told = {functions[0].address for _, functions in wanted}
    for resource, (first, *others) in wanted:
        for function in others:
            if function.address in told:
                continue
            told.add(function.address)
            why = (
                f"it goes with {first.address}, since {group.name} can only be had whole; exclude its address where "
                "that is meant"
            )
            yield replace(
                function.as_device(),
                unit=unit,
                resource=resource.name,
                unusable=why,
                attributes=_attributes(group, function),
                by_design=card(function.address) == card(first.address) and function.kind[:2] != first.kind[:2],
            )


def selected(resource: VfioResource, group: Group) -> list[pci.Function]:
    """The functions of a group that a resource selects, by address."""
    return [it for it in group.functions if resource.refuses(_plain(it.address, group, it)) is None]


def depends(unit: str) -> str:
    """The hardware that signals about the group are about; another backend may have the functions themselves."""
    return f"iommu:{unit}"


def _device(host: Host, unit: str, group: Group, resource: VfioResource, functions: Sequence[pci.Function]) -> Device:
    first = functions[0]
    options = resource.spec.options
    unresettable = (pci.reset_refusal(host, function) for function in functions)
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
        unusable=_without_iommu(host, group) or plan(host, group, functions, resource).refusal,
        no_reset=next(filter(None, unresettable), "") if resource.spec.pre_start == "reset" else "",
        attributes=_attributes(group, first),
    )


def _without_iommu(host: Host, group: Group) -> str:
    """Why a function without a group cannot be had; empty if vfio may make a group for it."""
    if group.number or sysfs.attribute(host, _NOIOMMU_ALLOWED) in ("Y", "1"):
        return ""
    return f"it is in no IOMMU group: {iommu.how_to_turn_on(host)}"


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
    """Whether the kernel makes a node for each function (6.6 and newer, with CONFIG_VFIO_DEVICE_CDEV)."""
    return host.local(IOMMUFD).exists() and all(
        function.vfio and sysfs.attribute(host, function.path / "vfio-dev" / function.vfio[0] / "dev") is not None
        for function in functions
    )


def _node(path: HostPath) -> Node:
    return Node(path, path.text, _PERMISSIONS)


# --- health ---


def signals(
    host: Host, device: Device, group: Group, functions: Sequence[pci.Function], resource: VfioResource
) -> Iterator[Signal]:
    """What is wrong with the device now."""
    options = resource.spec.options
    first, signal = functions[0], partial(Signal, depends(device.unit))
    planned = plan(host, group, functions, resource)
    if planned.obstacle:
        yield signal("group-not-viable", Verdict.NOW, planned.obstacle)
    if iommu.is_vfio(first):
        yield from _node_signals(host, device, group, functions, options)
    if options.bind == "start" and planned.bind:
        yield signal("not-bound", Verdict.NOW, _unbound(planned))
    elif not iommu.is_vfio(first) and (verdict := _verdict(host, first, options)) is not None:
        yield signal("driver-unbound", verdict, f"{first.address} has no driver; it belongs on {MODULE}")
    for function in functions:
        yield from pci_health.signals(host, function.address)


def _unbound(planned: Plan) -> str:
    function = planned.bind[-1]
    has = f"is on {function.driver}" if function.driver else "has no driver"
    return f"{function.address} {has}: Fairlead binds it to {MODULE} while it runs; if it cannot, its log says why"


def _verdict(host: Host, function: pci.Function, options: VfioOptions) -> Verdict | None:
    """The verdict on a function without a driver; None if none is needed before a pod asks."""
    if function.driver is not None:
        return None
    if options.bind == "never":
        return Verdict.NOW
    return Verdict.DEGRADED if pci.driver_override(host, function.address) == MODULE else None


def _node_signals(
    host: Host, device: Device, group: Group, functions: Sequence[pci.Function], options: VfioOptions
) -> Iterator[Signal]:
    signal = partial(Signal, depends(device.unit))
    if options.iommu == "iommufd" and group.is_noiommu:
        yield signal("no-iommufd", Verdict.NOW, f'{device.key} has no IOMMU, which iommufd needs; set iommu = "legacy"')
    elif options.iommu == "iommufd" and not has_own_nodes(host, functions):
        why = (
            f"the kernel makes no node of its own for {device.key}, or no /dev/iommu: both need Linux 6.6 and the module "
            'iommufd; or set iommu = "legacy"'
        )
        yield signal("no-iommufd", Verdict.NOW, why)
        return
    yield from missing(host, depends(device.unit), device.nodes)
