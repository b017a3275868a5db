"""The slots of one resource as they change, and the snapshots taken of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from agent import limits
from agent.devices.model import Health, Held, Slot, Snapshot
from backends.base import Device


class Listing:
    """One resource's slots; knows what changed since the last snapshot, and the size of the list."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.slots: dict[str, Slot] = {}
        self.owners: dict[str, tuple[str, str, str, str]] = {}  # ID → the found device behind it
        self.claims: dict[str, Held] = {}  # ID → the pod's claim
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
        self._bytes += _size(slot) - (_size(before) if before else 0)
        self.slots[slot.id] = slot
        self._changed.add(slot.id)
        self.dirty = True

    def put_device(self, ids: Iterable[str], device: Device, health: Health) -> None:
        """Write all slots of one device, which may be 1,000.

        They are compared by identity: a device or a health that says the same as before is the same object.
        """
        slots, changed, others = self.slots, [], []
        for device_id in ids:
            before = slots.get(device_id)
            if before is None or before.device is not device:
                others.append(device_id)
            elif before.health is health:
                continue
            changed.append(device_id)
        if changed:
            self._bytes += _size_of_all(others, device.numa_node) - self._listed_size(others)
            slots.update((device_id, Slot(device_id, device, health)) for device_id in changed)
            self._changed.update(changed)
            self.dirty = True

    def drop(self, ids: Collection[str]) -> None:
        """Take slots off the list."""
        if listed := [device_id for device_id in ids if device_id in self.slots]:
            self._bytes -= self._listed_size(listed)
            for device_id in listed:
                del self.slots[device_id]
            self._changed.update(listed)
            self.dirty = True

    def _listed_size(self, ids: Iterable[str]) -> int:
        """What these IDs, as far as they are listed, take of the message."""
        by_node: defaultdict[int | None, list[str]] = defaultdict(list)
        for device_id in ids:
            if (slot := self.slots.get(device_id)) is not None:
                by_node[_numa_node(slot)].append(device_id)
        return sum(_size_of_all(alike, numa_node) for numa_node, alike in by_node.items())

    def touch(self) -> None:
        """Make the next snapshot due although nothing changed."""
        self.dirty = True

    def snapshot(self) -> Snapshot:
        """Everything listed now, as a new generation; unclaimed slots beyond the kubelet's limit are left out."""
        self._generation += 1
        changed, self._changed = frozenset(self._changed), set()
        self.dirty = False
        if self._bytes <= limits.MESSAGE_LIMIT:
            partial, self.omitted = bool(self.omitted), 0
            return Snapshot(self.resource, self._generation, self.slots.copy(), None if partial else changed)
        slots = self._fitting()
        self.omitted = len(self.slots) - len(slots)
        return Snapshot(self.resource, self._generation, slots, None)

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


def _numa_node(slot: Slot) -> int | None:
    return slot.device.numa_node if slot.device else None


def _size_of_all(ids: Iterable[str], numa_node: int | None) -> int:
    """Of IDs on one NUMA node; those of one device are of few lengths."""
    lengths = Counter(map(len, map(str.encode, ids)))
    return sum(limits.slot_bytes("x" * length, numa_node) * count for length, count in lengths.items())


def _size(slot: Slot) -> int:
    return limits.slot_bytes(slot.id, _numa_node(slot))
