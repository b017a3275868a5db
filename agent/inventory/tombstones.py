"""Decides what pods' claims mean for slots: tombstones for devices that are gone, and IDs that are kept back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from functools import lru_cache
from typing import Final

from agent.model import REPLACED, Health, Held, SlotKey, State
from backends.base import Device

GONE: Final = Health(State.UNHEALTHY, "gone", "the device is gone; a pod still holds it")


NOT_SEEN: Final = "not-seen"
"""The reason that faces give in its place while the device may be there and nobody could look."""


class Holdings:
    """The claims, by their slots and by their hardware."""

    def __init__(self) -> None:
        self.by_slot: dict[SlotKey, Held] = {}
        self.by_hardware: defaultdict[str, set[SlotKey]] = defaultdict(set)
        """Hardware → the slots of the pods that hold it; never an empty set."""

    def add(self, claim: Held) -> Held | None:
        """A pod holds this from now on; what its slot was before, which may be the same."""
        if (before := self.by_slot.get(claim.slot)) != claim:
            self.remove(claim.slot)
            self.by_slot[claim.slot] = claim
            for hardware in claim.hardware:
                self.by_hardware[hardware].add(claim.slot)
        return before

    def astray_from(self, device: Device, resource: str, astray: Container[str]) -> list[str]:
        """Of a resource's IDs that are astray, those of pods that hold hardware of this device; in no time, if none is."""
        hardware = min(device.hardware, key=lambda name: len(self.by_hardware.get(name, ())))
        held = self.by_hardware.get(hardware, ())
        return [device_id for name, device_id in held if name == resource and device_id in astray]

    def remove(self, slot: SlotKey) -> Held | None:
        """Nobody holds this any more; what it was."""
        claim = self.by_slot.pop(slot, None)
        for hardware in claim.hardware if claim else ():
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


def kept_back(
    ids: Sequence[str], device: Device, claims: Mapping[str, Held], astray: Collection[str]
) -> Mapping[str, Health]:
    """The IDs of a device that are in nobody's reach while pods hold its hardware under IDs that it does not have.

    Its IDs are other ones since the configuration changed, or another plugin gave it; no more pods than it has IDs shall
    have the hardware, or the kubelet would give it away twice (kubelet contract: A7.4). For each such pod, the last free ID
    is kept back; where there are not so many, one that a pod holds, since that pod may end before we know of it.

    Args:
        ids: the device's, as they are now.
        device: the device.
        claims: of its resource, by ID.
        astray: the resource's claimed IDs that their hardware is not behind, at least those with all of this device's.
    """
    others = set(astray).difference(ids)  # one of its own comes home now
    earlier = sorted(i for i in others if claims[i].hardware >= device.hardware and is_same(claims[i], device))
    if not earlier:
        return {}
    free_last = sorted(ids, key=lambda device_id: device_id not in claims)
    why = Health(State.UNHEALTHY, "held", f"a pod holds the same hardware under an earlier ID, {', '.join(earlier)}")
    return dict.fromkeys(free_last[-len(earlier) :], why)
