"""Decides what pods' claims mean for slots: former IDs, tombstones for devices that are gone, IDs that are kept back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from agent.model import REPLACED, Health, Held, SlotKey, State
from agent.runtime.errors import some
from backends.base import Device

GONE: Final = Health(State.UNHEALTHY, "gone", "the device is gone; a pod still holds it")
UNMAPPED: Final = Health(
    State.UNHEALTHY, "unmapped", "a pod holds it, and nothing that the pod was given leads to a device of this node"
)
CROWDED: Final = Health(State.UNHEALTHY, "held", "more pods hold the same hardware than may have it")

NOT_SEEN: Final = "not-seen"
"""The reason that faces show instead while the backend could not look whether the device is there."""


class Holdings:
    """The claims, by their slots and by their hardware."""

    def __init__(self) -> None:
        self.by_slot: dict[SlotKey, Held] = {}
        self.by_hardware: defaultdict[str, set[SlotKey]] = defaultdict(set)
        """Hardware → the slots of the pods that hold it; never an empty set."""

    def add(self, claim: Held) -> Held | None:
        """Keep this claim; returns the one that its slot had before, which may be equal."""
        slot = claim.slot
        if (before := self.by_slot.get(slot)) != claim:
            if before is not None:
                self.remove(slot)
            self.by_slot[slot] = claim
            for hardware in claim.hardware:
                self.by_hardware[hardware].add(slot)
        return before

    def remove(self, slot: SlotKey) -> Held:
        """Forget the claim of this slot; returns it."""
        claim = self.by_slot.pop(slot)
        for hardware in claim.hardware:
            self.by_hardware[hardware].discard(slot)
            if not self.by_hardware[hardware]:
                del self.by_hardware[hardware]
        return claim


def is_same(claim: Held, device: Device) -> bool:
    """Is this the card that the pod was given? What cannot be seen of it now tells nothing."""
    if claim.identity and device.identity and claim.identity != device.identity:
        return False
    return not claim.hardware or not claim.hardware.isdisjoint(device.hardware)


def replaced(claim: Held, device: Device) -> Health:
    """Of a slot that has another device than its pod was given."""
    was, now = claim.identity, device.identity
    if was == now:
        was, now = ", ".join(sorted(claim.hardware)), ", ".join(sorted(device.hardware))
    return Health(State.UNHEALTHY, REPLACED, f"another device ({now}) is where the pod's ({was}) was")


def retired(resource: str) -> Health:
    """Of a slot whose resource is no longer configured."""
    return Health(State.UNHEALTHY, "retired", f"{resource} is no longer configured")


@lru_cache(maxsize=1024)  # the same object for the same claim: lists tell by that what has changed
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
