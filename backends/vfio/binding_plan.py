"""Plans what to bind so that a resource can have a group, and tells what is in the way; pure but for reading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from backends.base import Host
from backends.linux import iommu, pci
from backends.linux.host_uses import uses
from backends.linux.iommu import Group, Member
from backends.vfio.options import VfioOptions, VfioResource
from backends.vfio.vgpu import refusal, vgpus


class Plan(Struct, frozen=True):
    """What it takes to hand a group out."""

    bind: tuple[pci.Function, ...] = ()
    """The functions to bind to a vfio driver; companions first, so that the group is viable when its node appears."""
    refusal: str = ""
    """Why a selected function cannot be had, one sentence."""
    obstacle: str = ""
    """Why the group would not be viable even then, one sentence."""


def plan(host: Host, group: Group, selected: Sequence[pci.Function], resource: VfioResource) -> Plan:
    """What the resource's options permit.

    `selected` are the functions that the resource wants; the device is named by the first of them.
    """
    options = resource.spec.options
    wanted = {function.address for function in selected}
    others = [member for member in group.members if member.name not in wanted and not member.is_bridge]
    companions = [f for member in others if (f := _companion(member, selected, options)) is not None]
    obstacles = _obstacles(host, group, others, companions, resource)
    refusals = [why for function in selected if (why := _refusal(host, function, resource))]
    permitted = [*companions, *selected] if options.bind != "never" else []
    return Plan(
        bind=tuple(function for function in permitted if not iommu.is_vfio(function)),
        refusal=next(iter(refusals), ""),
        obstacle=next(obstacles, ""),
    )


def _companion(member: Member, selected: Sequence[pci.Function], options: VfioOptions) -> pci.Function | None:
    """The function of the member, if it may be bound along.

    One without a driver is bound too: its own driver may be loaded at any time, after which the group is not viable any more.
    """
    function = member.function
    if function is None or options.bind == "never" or (member.driver is not None and member.is_viable):
        return None
    cards = {card(one.address) for one in selected}
    return function if options.companions == "group" or card(function.address) in cards else None


def card(address: str) -> str:
    """The part of an address that all functions of one card share."""
    return address.rpartition(".")[0]


def _obstacles(
    host: Host, group: Group, others: Sequence[Member], companions: Sequence[pci.Function], resource: VfioResource
) -> Iterator[str]:
    for member in others:
        function = member.function if member.function in companions else None
        need = need_of(host, function, resource) if function is not None else None
        where = f"{group.name} cannot be handed out while {member.name}, which is in it,"
        if member.is_viable:
            if need is not None:
                yield f"{where} {need}"
        elif need is not None:
            yield f"{where} is bound to {member.driver} and {need}"
        elif function is None:
            hint = (
                '; companions = "group" would permit to bind it too'
                if _could_be_bound(member, resource.spec.options)
                else ""
            )
            yield f"{where} is bound to {member.driver}{hint}"


def _could_be_bound(member: Member, options: VfioOptions) -> bool:
    return member.function is not None and options.bind != "never" and options.companions == "card"


def _refusal(host: Host, function: pci.Function, resource: VfioResource) -> str:
    """Why a selected function cannot be had; empty if it can."""
    options = resource.spec.options
    if (of_vgpu := refusal(host, function, options.vgpu_type)) is not None:
        return of_vgpu
    if options.vgpu_type is not None:
        return f"it can have no vGPU type, and {options.vgpu_type} is asked for"
    if iommu.is_vfio(function):
        return ""
    if (why := vgpus(host, function)) is not None:
        return f"it {why}, which would go with another driver: offer it as what the driver made of it"
    if options.bind == "never":
        if function.driver is None:
            return ""  # it may be between two drivers; its health tells
        return f'its driver is {function.driver}; bind it to vfio-pci, or set bind = "start" or "allocate"'
    if (why := need_of(host, function, resource)) is not None:
        return f"it {why}, and so is left to the host (see force)"
    return ""


def need_of(host: Host, function: pci.Function, resource: VfioResource) -> str | None:
    """What the host needs a function for; None if nothing, or if `force` names it. It ends no virtual GPUs.

    One that a selector names by its address may have addresses of the host.
    """
    if (why := vgpus(host, function)) is not None:
        return why
    named = any(function.address in table.get("address", ()) for table in resource.spec.select)
    return None if function.address in resource.spec.options.force else next(uses(host, function, named=named), None)
