"""The slots of one resource as they change, and the snapshots taken of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent import limits
from agent.devices.model import Slot, Snapshot


class Listing:
    """One resource's slots; knows what changed since the last snapshot, and the size of the list."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.slots: dict[str, Slot] = {}
        self.owners: dict[str, tuple[str, str, str, str]] = {}  # ID → the found device behind it
        self.dirty = True
        self.omitted = 0
        self._generation = 0
        self._changed: set[str] = set()
        self._bytes = 0

    def put(self, slot: Slot) -> None:
        """Write a slot; nothing happens if it says what is there."""
        before = self.slots.get(slot.id)
        if before == slot:
            return
        if before is None or _numa_node(before) != _numa_node(slot):
            self._bytes += _size(slot) - (_size(before) if before else 0)
        self.slots[slot.id] = slot
        self._changed.add(slot.id)
        self.dirty = True

    def drop(self, device_id: str) -> None:
        """Take a slot off the list."""
        if (slot := self.slots.pop(device_id, None)) is not None:
            self._bytes -= _size(slot)
            self._changed.add(device_id)
            self.dirty = True

    def touch(self) -> None:
        """Make the next snapshot due although nothing changed."""
        self.dirty = True

    def snapshot(self, claims: Mapping[tuple[str, str], Any]) -> Snapshot:
        """Everything listed now, as a new generation; unclaimed slots beyond the kubelet's limit are left out."""
        self._generation += 1
        changed, self._changed = frozenset(self._changed), set()
        self.dirty = False
        if self._bytes <= limits.MESSAGE_LIMIT:
            partial, self.omitted = bool(self.omitted), 0
            return Snapshot(self.resource, self._generation, self.slots.copy(), None if partial else changed)
        slots = self._fitting(claims)
        self.omitted = len(self.slots) - len(slots)
        return Snapshot(self.resource, self._generation, slots, None)

    def _fitting(self, claims: Mapping[tuple[str, str], Any]) -> dict[str, Slot]:
        """The claimed slots, and as many others as the message limit allows, the oldest first."""
        held = {i for i in self.slots if (self.resource, i) in claims}
        room = limits.MESSAGE_LIMIT - sum(_size(self.slots[i]) for i in held)
        fitting = {}
        for device_id, slot in self.slots.items():
            if device_id not in held:
                room -= _size(slot)
                if room < 0:
                    continue
            fitting[device_id] = slot
        return fitting


def _numa_node(slot: Slot) -> int | None:
    return slot.device.numa_node if slot.device else None


def _size(slot: Slot) -> int:
    return limits.slot_bytes(slot.id, _numa_node(slot))
