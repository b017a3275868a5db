"""Decides which resource gets which device, among devices that compete with each other; pure.

Hardware that a pod holds belongs to the pod's resource before any other decision, and the IDs that pods hold go
to the devices they have: those with exactly the hardware and identity that a pod was given before those with some of
it, and of these the one that more pods point at. Then, in the order of the config, each resource takes the devices it
selects whose hardware is free or already its own. A name that a template made of a value is for devices with that value
alone. What is exclusive is offered by one device alone, and while a
pod holds it under its ID alone. The outcome depends on what is there, not on what came first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from types import MappingProxyType
from typing import Generic, TypeVar

from msgspec import Struct

from agent.inventory.tombstones import is_same
from agent.model import Held
from backends.base import Device

Ref = TypeVar("Ref", bound=tuple[str, ...])


def piece(device: Device) -> frozenset[str]:
    """The hardware that a device is by its key: of an IOMMU group the function that names it, not its companions."""
    named = f"pci:{device.key}"
    return frozenset({named}) if named in device.hardware else device.hardware


class Candidate(Struct, frozen=True, gc=False):
    """A resource that selects a device, and the IDs it would have there."""

    resource: str
    order: int
    ids: tuple[str, ...]
    value: str = ""
    """Of which value a template made the resource's name; empty if none did."""


class Outcome(Struct, Generic[Ref]):
    """The candidate that each device joined, and for each refusal the reason."""

    placed: dict[Ref, Candidate] = {}
    rejected: dict[Ref, tuple[str, ...]] = {}


def assign(
    rivals: Mapping[Ref, tuple[Device, tuple[Candidate, ...]]],
    claims: Mapping[tuple[str, str], Held],
    claimed: Mapping[str, Set[tuple[str, str]]],
    stands_for: Mapping[str, str] = MappingProxyType({}),
) -> Outcome[Ref]:
    """Decide for a closed set of rivals: devices that share hardware or IDs with none outside it.

    Args:
        rivals: each device with the resources that select it.
        claims: what pods hold, by slot.
        claimed: hardware → the slots of the pods that hold it.
        stands_for: name that a template gave → of which value; a device with another value cannot have it, too.
    """
    outcome: Outcome[Ref] = Outcome()
    owner: dict[str, str] = {}  # hardware → resource
    user: dict[str, Device] = {}  # hardware → the last device that got it
    holder: defaultdict[str, dict[str, Device]] = defaultdict(dict)  # resource → ID → device
    values = dict(stands_for)
    for device, _ in rivals.values():
        for hardware in device.hardware:
            if slots := claimed.get(hardware):
                owner[hardware] = min(resource for resource, _ in slots)
    bids = [
        (_pull(device, candidate, claims) if claims else (0, 0), candidate.order, ref, candidate)
        for ref, (device, candidates) in rivals.items()
        for candidate in candidates
    ]
    for _, _, ref, candidate in sorted(bids, key=lambda bid: bid[:3]):
        if ref in outcome.placed:
            continue
        device, name = rivals[ref][0], candidate.resource
        if (value := values.get(name, candidate.value)) != candidate.value:
            why: str | None = f"that name stands for {value} already, and this has {candidate.value}"
        else:
            why = _obstacle(device, candidate, owner, user, holder[name], claims, claimed)
        if why is not None:
            outcome.rejected[ref] = (*outcome.rejected.get(ref, ()), f"{name} selects it, but {why}")
            continue
        outcome.placed[ref] = candidate
        values.setdefault(name, candidate.value)
        owner.update(dict.fromkeys(device.hardware, name))
        user.update(dict.fromkeys(device.hardware, device))
        holder[name].update(dict.fromkeys(candidate.ids, device))
    return outcome


def _pull(device: Device, candidate: Candidate, claims: Mapping[tuple[str, str], Held]) -> tuple[int, int]:
    """How strongly pods draw the device to the resource, the least first: minus those who have it, who may have it.

    A claim that an Allocate adds to a device never puts another before it: counted, it could only have been before.
    """
    have = may_have = 0
    for device_id in candidate.ids:
        claim = claims.get((candidate.resource, device_id))
        if claim is None:
            continue
        is_where_it_was = claim.place == device.place if claim.place else claim.hardware == device.hardware
        if is_where_it_was and claim.identity in ("", device.identity, *device.aliases):
            have += 1
        elif not claim.hardware or not claim.hardware.isdisjoint(device.hardware) or is_same(claim, device):
            may_have += 1
    return -have, -may_have


def _obstacle(
    device: Device,
    candidate: Candidate,
    owner: Mapping[str, str],
    user: Mapping[str, Device],
    holder: Mapping[str, Device],
    claims: Mapping[tuple[str, str], Held],
    claimed: Mapping[str, Set[tuple[str, str]]],
) -> str | None:
    """Why the resource cannot have the device, or should not offer it, or None.

    It should not where it has exclusive hardware of the device under another name, or a pod holds that so. A pod's other ID
    does not matter to a device with several, which pods share, nor to one that is held itself, nor where the pod has all of
    the device: it is listed for that pod, and kept back from others.
    """
    name, ids = candidate.resource, candidate.ids
    unshared = len(ids) == 1 and (name, ids[0]) not in claims
    for hardware in sorted(device.hardware):
        if (resource := owner.get(hardware, name)) != name:
            verb = "is held by a pod through" if claimed.get(hardware) else "belongs to"
            what = hardware if hardware in piece(device) else f"{hardware}, which goes with it,"
            whole = user.get(hardware)
            part = f", as part of {whole.key}" if whole is not None and hardware not in piece(whole) else ""
            return f"{what} {verb} {resource}{part}"
        if (other := user.get(hardware)) is not None and hardware in device.exclusive | other.exclusive:
            return f"{hardware} is offered as {other.key} already"
        if unshared and hardware in device.exclusive:
            for slot in sorted(claimed.get(hardware, ())):
                if slot[0] == name and slot[1] not in ids and not claims[slot].hardware >= device.hardware:
                    return f"{hardware} is held by a pod as {slot[1]}"
    if holder:
        for device_id in ids:
            if (other := holder.get(device_id)) is not None:
                return f"its ID {device_id} is that of {other.key}"
    return None
