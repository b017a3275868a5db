"""Keeps the slots of one resource, and takes snapshots of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from agent.inventory.found_devices import Found
from agent.inventory.tombstones import is_same
from agent.model import HEALTHY, Health, Held, Slot, Snapshot
from agent.runtime import limits
from backends.base import Device


class Listing:
    """One resource's slots; knows what changed since the last snapshot."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.slots: dict[str, Slot] = {}
        self.owners: dict[str, Found] = {}  # ID → the device behind it
        self.claims: dict[str, Held] = {}  # ID → the pod's claim
        self.astray: set[str] = set()  # IDs of pods that no device has, or another one than the pod's
        self.crowded: set[Found] = set()  # the devices that more pods hold than may have them
        self.withheld: Health | None = None  # of what is free, while what a pod holds may be any of it
        self._kept_back: set[str] = set()
        self.dirty = True  # is another snapshot due?
        self.omitted = 0
        self._generation = 0
        self._changed: set[str] = set()
        self._undated: set[str] = set()  # IDs with a health that does not say since when
        self._listed: Mapping[str, Slot] = {}  # by the last snapshot

    def put(self, slot: Slot) -> None:
        """Write a slot; nothing happens if it says what is there. What does not say since when is dated by `snapshot`."""
        claim = self.claims.get(slot.id)
        if slot.id not in self.owners or (claim and slot.device and not is_same(claim, slot.device)):
            self.astray.add(slot.id)
        else:
            self.astray.discard(slot.id)
        before = self.slots.get(slot.id)
        if not (slot.health.since or slot.health is HEALTHY):
            if before is not None and before.device == slot.device and before.health.says_what(slot.health):
                return
            self._undated.add(slot.id)
        if before == slot:
            return
        self.slots[slot.id] = slot
        self._changed.add(slot.id)
        self.dirty = True

    def put_device(self, ids: Collection[str], device: Device, health: Health) -> None:
        """Write all slots of one device, which may be 1,000.

        They are compared by identity: a device or a health that says the same as before is the same object.
        """
        slots, changed = self.slots, []
        for device_id in ids:
            before = slots.get(device_id)
            if before is None or before.device is not device or before.health is not health:
                changed.append(device_id)
        if changed:
            slots.update((device_id, Slot(device_id, device, health)) for device_id in changed)
            self._changed.update(changed)
            self.dirty = True
        if self.astray:
            self.astray.difference_update(ids)

    def drop(self, ids: Collection[str]) -> None:
        """Take slots off the list."""
        if listed := [device_id for device_id in ids if device_id in self.slots]:
            for device_id in listed:
                del self.slots[device_id]
            self._changed.update(listed)
            self.astray.difference_update(listed)
            self._kept_back.difference_update(listed)
            self.dirty = True

    @property
    def keeps_back(self) -> bool:
        """Is any ID kept back for a pod that holds hardware which is not behind its ID, or may one have to be?"""
        return bool(self.astray or self._kept_back or self.withheld)

    def unmapped(self) -> frozenset[str]:
        """The claimed IDs whose hardware is unknown."""
        return frozenset(i for i in self.astray if i not in self.owners and not self.claims[i].hardware)

    def keep_back(self, found: Found, ids: Iterable[str], back: Iterable[str], *, crowded: bool) -> None:
        """Of these IDs of a device, those are kept back; is it `crowded`?"""
        self._kept_back.difference_update(ids)
        self._kept_back.update(back)
        (self.crowded.add if crowded else self.crowded.discard)(found)

    def go_on_from(self, before: Listing) -> None:
        """Take up where the resource's list is, which has been another one's so far: only what differs has changed."""
        self._generation, self._listed, self.omitted = before._generation, before._listed, before.omitted
        self._changed = before._changed | (before.slots.keys() ^ self.slots.keys())
        for device_id, now in self.slots.items():
            was = before.slots.get(device_id)
            if was is None or (was.device is now.device and was.health is now.health):
                continue
            if was.device == now.device and was.health.says_what(now.health):
                self.slots[device_id] = was
            else:
                self._changed.add(device_id)
        self.dirty = before.dirty or bool(self._changed)

    def snapshot(self, now: float = 0.0, size: int = 0) -> Snapshot:
        """Everything listed now, as a new generation; unclaimed slots beyond the kubelet's limit are left out.

        Args:
            now: monotonic seconds; 0: nothing is dated.
            size: the bytes that the IDs of the devices take of a message; with those `astray` it is what all take, or more.
        """
        if self._undated:
            self._date(now)
        self._generation += 1
        changed, self._changed = frozenset(self._changed), set()
        self.dirty = False
        was_partial = self.omitted > 0
        size += sum(_size(self.slots[device_id]) for device_id in self.astray)
        self._listed = self.slots.copy() if size <= limits.MESSAGE_LIMIT else self._fitting()
        self.omitted = len(self.slots) - len(self._listed)
        comparable = None if was_partial or self.omitted else changed
        return Snapshot(self.resource, self._generation, self._listed, comparable, self.omitted)

    def _date(self, now: float) -> None:
        """Date health that has no date, where the slot was listed before; of others the change was not seen."""
        dated: dict[Health, Health] = {}  # the same object for what is alike
        for device_id in self._undated & self._listed.keys() & self.slots.keys():
            slot, before = self.slots[device_id], self._listed[device_id].health
            health = slot.health
            if health.since:
                continue
            if before.says_what(health):
                health = before
            elif (known := dated.get(health)) is not None:
                health = known
            else:  # not `replace`, which takes four times as long
                known = Health(health.state, health.reason, health.message, now, health.while_held)
                dated[health] = health = known
            self.slots[device_id] = Slot(device_id, slot.device, health)
        self._undated.clear()

    def _fitting(self) -> dict[str, Slot]:
        """The claimed slots, and as many others as the message limit allows, the oldest first."""
        room = limits.MESSAGE_LIMIT - sum(_size(self.slots[device_id]) for device_id in self.claims)
        fitting = {}
        for device_id, slot in self.slots.items():
            if device_id not in self.claims:
                room -= _size(slot)
                if room < 0:
                    continue
            fitting[device_id] = slot
        return fitting


def _size(slot: Slot) -> int:
    return limits.slot_bytes(slot.id, slot.device.numa_node if slot.device else None)
