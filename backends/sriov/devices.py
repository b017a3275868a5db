"""Makes a device of each function, for the resources that select it and whose options it meets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from backends.base import Device, Discovery, Host, Problem
from backends.linux import pci
from backends.sriov import creation, functions, nodes, subfunctions
from backends.sriov.functions import Seen
from backends.sriov.options import SriovResource

_OF_ONE: Final = frozenset({"address", "function", "ifname"})
"""Attributes by which a card is told from its virtual functions."""


def find(host: Host, resources: Sequence[SriovResource], unit: str) -> Discovery:
    """The devices of a function or subfunction, one for each resource that could have it."""
    look = functions.look if pci.ADDRESS.fullmatch(unit) else subfunctions.look
    seen = look(host, resources, unit)
    if seen is None:
        return Discovery()
    if (asked := creation.asked(resources, seen.device)) is not None:
        resource, count = asked
        if not seen.virtual:
            return Discovery((creation.stand_in(seen.device, resource, count),), problems=seen.problems)
        if seen.virtual != count:
            problem = Problem(unit, creation.different(unit, seen.virtual, count))
            seen = replace(seen, problems=(*seen.problems, problem))
    mine = [it for it in resources if it.spec.options.device_type == seen.device_type]
    if not seen.needed:
        return Discovery(_taken(host, seen, mine), problems=seen.problems, beside=(seen.device,))
    needed = replace(seen.device, unusable=seen.needed, by_design=True)
    devices = _withheld(seen, needed, mine)
    return Discovery(devices, problems=seen.problems, beside=() if devices else (needed,))


def _withheld(seen: Seen, needed: Device, resources: Sequence[SriovResource]) -> tuple[Device, ...]:
    """The device with why it is left alone, for the first resource that might take it.

    A card with virtual functions is offered as these: it is for a resource only if a selector means the card itself.
    """
    meant = (it for it in resources if it.might_take(needed) and (not seen.virtual or _OF_ONE & it.asks_for))
    return tuple(replace(needed, resource=it.configured) for it in [*meant][:1])


def _taken(host: Host, seen: Seen, resources: Sequence[SriovResource]) -> tuple[Device, ...]:
    """The device for each resource that wants it, with why it cannot offer it; a card that no resource wants is none.

    The first resource that can offer it gets it, unless a pod has it from another.
    """
    selecting = [it for it in resources if it.refuses(seen.device) is None]
    might = selecting if seen.has_driver else [it for it in resources if it.might_take(seen.device)]
    if might:
        return tuple(
            replace(seen.device, resource=it.configured, unusable=why)
            if (why := _lacks(seen, it))
            else _offered(host, seen, it)
            for it in might
        )
    is_part = seen.device.depends
    return (replace(seen.device, resource=resources[0].configured),) if is_part else ()


def _lacks(seen: Seen, resource: SriovResource) -> str:
    """What the function lacks of what the resource's options ask for; empty if nothing."""
    options = resource.spec.options
    if not seen.has_driver:
        return "it has no driver"
    if options.rdma and seen.adapter is None:
        return f"it has no RDMA device, which {resource.name} asks for (rdma)"
    if options.vdpa is not None and (seen.vdpa is None or seen.vdpa.kind != options.vdpa):
        return f"it has no vDPA device on {options.vdpa}_vdpa, which {resource.name} asks for (vdpa)"
    return ""


def _offered(host: Host, seen: Seen, taker: SriovResource) -> Device:
    """The device as a resource offers it: its nodes in the order of the sriov-network-device-plugin."""
    options = taker.spec.options
    every = list(seen.nodes)
    if options.rdma and seen.adapter is not None:
        every += nodes.of_rdma(host, seen.adapter)
    if options.vhost_net:
        every += nodes.of_vhost(host)
    if options.vdpa == "vhost" and seen.vdpa is not None:
        every += seen.vdpa.nodes
    numa_node = seen.device.numa_node if options.topology else None
    return replace(seen.device, resource=taker.configured, nodes=tuple(every), numa_node=numa_node)
