"""Decides what pods' claims mean for slots: former IDs, tombstones for devices that are gone, IDs that are kept back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from agent.health.presence import PLUGGED
from agent.inventory.selection import Found
from agent.model import FORGOTTEN, TWO_PODS, Health, Held, ResourceClaim, SlotKey, State
from agent.runtime.errors import some
from backends.base import Device

GONE: Final = Health(State.UNHEALTHY, "gone", "the device is gone; a pod still holds it")
UNMAPPED: Final = Health(
    State.UNHEALTHY, "unmapped", "a pod holds it, and nothing that the pod was given leads to a device of this node"
)
TROUBLES: Final = {
    FORGOTTEN: Health(
        State.UNHEALTHY, FORGOTTEN,
        "a pod holds it, and the kubelet, which lost its record of that, would give it to another pod",
    ),
    TWO_PODS: Health(
        State.UNHEALTHY, TWO_PODS,
        "two pods hold it at the same time, because the kubelet gave it out twice: delete one of them",
    ),
}  # fmt: skip
"""Of a slot for one pod, by the trouble of its claim."""
CROWDED: Final = Health(State.UNHEALTHY, "held", "more pods hold the same hardware than may have it")


def claimed(by: ResourceClaim) -> Health:
    """Of an ID of a resource that is served by device plugin now, and that a ResourceClaim has from before."""
    message = f"ResourceClaim {by.namespace}/{by.name} has it, by dynamic resource allocation"
    return Health(State.UNHEALTHY, CROWDED.reason, message)


NOT_SEEN: Final = "not-seen"
"""The reason that faces show instead while the backend could not look whether the device is there."""


class Holdings:
    """Claims, by their slots, by their hardware and by their places."""

    def __init__(self, claims: Iterable[Held] = ()) -> None:
        self.by_slot: dict[SlotKey, Held] = {}
        self.by_hardware: defaultdict[str, set[SlotKey]] = defaultdict(set)
        """Hardware → the slots of the pods that hold it; never an empty set."""
        self.by_place: defaultdict[str, set[SlotKey]] = defaultdict(set)
        """The same by `Held.place`."""
        for claim in claims:
            self.add(claim)

    def add(self, claim: Held) -> Held | None:
        """Keep this claim; returns the one that its slot had before, which may be equal."""
        slot = claim.slot
        if (before := self.by_slot.get(slot)) is not None:
            if before == claim:
                return before
            self.remove(slot)
        self.by_slot[slot] = claim
        for name in claim.hardware:
            self.by_hardware[name].add(slot)
        for name in claim.place:
            self.by_place[name].add(slot)
        return before

    def remove(self, slot: SlotKey) -> Held:
        """Forget the claim of this slot; returns it."""
        claim = self.by_slot.pop(slot)
        for index, names in ((self.by_hardware, claim.hardware), (self.by_place, claim.place)):
            for name in names:
                index[name].discard(slot)
                if not index[name]:
                    del index[name]
        return claim

    def first_of(self, hardware: Iterable[str]) -> Held | None:
        """The first claim, by its slot, of a pod that holds any of this."""
        slots = [min(self.by_hardware[name]) for name in hardware if name in self.by_hardware]
        return self.by_slot[min(slots)] if slots else None

    def alike(self) -> list[list[Held]]:
        """The claims, those of one device's tokens together: all that differs is the ID."""
        groups: defaultdict[tuple[Hashable, ...], list[Held]] = defaultdict(list)
        for it in self.by_slot.values():
            of_whom = it.claim and (it.claim.namespace, it.claim.name)
            groups[it.resource, it.hardware, it.identity, it.place, it.trouble, of_whom].append(it)
        return list(groups.values())


def places(of: Held | Device) -> frozenset[str]:
    """Where a device is, or a pod's was: the port it is plugged into, the PCI function that it is or stands on."""
    return of.place.union(name for name in of.hardware if name.startswith("pci:"))


def owns_its_place(of: Held | Device) -> bool:
    """Is it all that is there: a stick and not a node of it, a GPU and not a node that its driver made?"""
    return any(name.startswith(PLUGGED) for name in of.hardware)


def is_same(claim: Held, device: Device) -> bool:
    """Is this the card that the pod was given? What cannot be seen of it now tells nothing.

    Numbers of nodes and of buses are others after a boot, or once it was plugged in again: its place is not.
    """
    if claim.identity and device.identity and claim.identity not in (device.identity, *device.aliases):
        return False
    if claim.place and device.place:  # of one the other port of a socket (USB 2 and 3) may not be known yet
        return claim.place <= device.place or device.place <= claim.place
    return not claim.hardware or not claim.hardware.isdisjoint(device.hardware)


def given_to(claim: Held, at: Mapping[str, Iterable[Found]]) -> list[Found]:
    """The devices that have some of what a pod was given, or are where that was; those with its hardware come first.

    A stick is known by its port, too: its numbers do not last.

    Args:
        claim: the pod's.
        at: hardware, or a place → the devices there.
    """
    found = {it for name in claim.hardware for it in at.get(name, ()) if name in it.device.hardware}
    there = sorted(found, key=lambda it: it.ref)
    if claim.place and owns_its_place(claim):
        plugged = {it for name in claim.place for it in at.get(name, ()) if name in it.device.place} - found
        there += sorted((it for it in plugged if owns_its_place(it.device)), key=lambda it: it.ref)
    return there


def replaced(claim: Held, device: Device) -> Health:
    """Of a slot that has another device than its pod was given."""
    reason = "node-replaced" if any(name.startswith("node:") for name in claim.hardware) else "replaced"
    was, now = (" at ".join(filter(None, (it.identity, *sorted(it.place)))) for it in (claim, device))
    if was == now:
        was, now = (", ".join(sorted(it.hardware)) for it in (claim, device))
    return Health(State.UNHEALTHY, reason, f"it is {now} now; the pod that holds it was given {was}")


def retired(resource: str) -> Health:
    """Of a slot whose resource is no longer configured."""
    return Health(State.UNHEALTHY, "retired", f"{resource} is no longer configured")


@lru_cache(maxsize=1024)  # the same object for the same claim: lists tell by that what has changed
def beside(resource: str, device_id: str, where: str) -> Health:
    """Of a free slot whose device is where that of a pod is, or was."""
    return Health(State.UNHEALTHY, "held", f"a pod holds what is or was at {where}, as {resource}/{device_id}")


@lru_cache(maxsize=1024)  # as above
def elsewhere(resource: str, device_id: str) -> Health:
    """Of a slot whose hardware a pod has through another plugin's resource."""
    return Health(State.UNHEALTHY, "held", f"a pod holds it through {resource}/{device_id}, which another plugin gave")


def unusable(why: str) -> Health:
    """Of a slot whose device is there and cannot be used."""
    return Health(State.UNHEALTHY, "unusable", f"{why}; a pod still holds it")


@lru_cache(maxsize=1024)  # as above
def withheld(unmapped: frozenset[str]) -> Health:
    """Of a free slot of a resource with `adopt = "strict"` while pods hold these IDs and their hardware is unknown."""
    said = (
        f"pods hold {some(sorted(unmapped))} of this resource, and nothing that they were given leads to a device of "
        "this node: this one may be theirs (adopt = 'strict')"
    )
    return Health(State.UNHEALTHY, "withheld", said)


def kept_back(
    resource: str, ids: Sequence[str], free: Sequence[str], former: Sequence[SlotKey]
) -> Mapping[str, Health]:
    """The IDs of a device that no pod can get while pods hold its hardware under IDs that it does not have.

    Its IDs are other ones since the configuration changed, or another plugin gave it; no more pods than it has IDs shall
    have the hardware, or the kubelet would give it away twice (kubelet contract: A7.4). For each such pod, the last free ID
    is kept back, and the pod's ID takes its place. Where there are not so many free ones, all are kept back, also those that
    pods hold: the kubelet learns before we do that such a pod has ended, and the others have the hardware still.

    Args:
        resource: the device's.
        ids: the device's, as they are now.
        free: those of them that no pod holds.
        former: what pods hold the device under and that is none of its IDs.
    """
    if not former:
        return {}
    names = [device_id if name == resource else f"{name}/{device_id}" for name, device_id in former]
    why = Health(State.UNHEALTHY, "held", f"a pod holds the same hardware under another ID, {some(names)}")
    return dict.fromkeys(ids if len(former) > len(free) else free[-len(former) :], why)
