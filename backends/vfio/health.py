"""Checks the health of a group: can it be handed out, is it on a vfio driver, are its nodes and functions well?

Signals about the binding are about the group, which no other backend knows: a resource of another backend may have the same
function in another mode, and must not suffer. Signals about the function itself concern every backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from backends.base import Device, Host, Signal, Verdict
from backends.linux import iommu, nodes, pci, pci_health
from backends.linux.iommu import Group
from backends.vfio.binding_plan import Plan, plan
from backends.vfio.devices import depends, has_own_nodes
from backends.vfio.options import MODULE, VfioOptions, VfioResource


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
        yield from _nodes(host, device, group, functions, options)
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


def _nodes(
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
    yield from nodes.missing(host, depends(device.unit), device.nodes)
