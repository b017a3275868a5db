"""Keeps the list of one resource: what was decided last, what of it has changed since it was sent, and since when it is so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from agent.inventory.selection import Found
from agent.model import HEALTHY, Health, Held, Slot, Snapshot
from agent.runtime import limits


class Listing:
    """One resource's slots; knows what changed since the last snapshot."""

    def __init__(self, resource: str) -> None:
        self.resource = resource
        self.slots: dict[str, Slot] = {}
        self.owners: dict[str, Found] = {}  # ID → the device behind it
        self.claims: dict[str, Held] = {}  # ID → the pod's claim
        self.dirty = True  # whether another snapshot is due
        self.omitted = 0
        self._placed: dict[Found, None] = {}  # the devices behind all of them
        self._devices: tuple[Found, ...] | None = ()
        self._generation = 0
        self._changed: set[str] = set()
        self._undated: set[str] = set()  # IDs with a health that does not say since when
        self._listed: Mapping[str, Slot] = {}  # by the last snapshot

    @property
    def devices(self) -> tuple[Found, ...]:
        """Those that the resource has; the same object until one joins or leaves, or has other IDs."""
        if self._devices is None:
            self._devices = tuple(self._placed)
        return self._devices

    def join(self, found: Found, ids: Collection[str]) -> None:
        """A device has these IDs here from now on."""
        self._placed[found], self._devices = None, None
        self.owners.update(dict.fromkeys(ids, found))

    def leave(self, found: Found, ids: Collection[str]) -> None:
        """It has them no more."""
        del self._placed[found]
        self._devices = None
        for device_id in ids:
            del self.owners[device_id]

    def write(self, decided: Mapping[str, Slot]) -> None:
        """Write these slots, a thousand of one device at once; one that says what is there already stays as it is."""
        slots, changed = self.slots, list[str]()
        was = now = HEALTHY
        is_same, is_undated = True, False
        # all tokens of a device are alike: of what is, and was, the same, once is enough
        for (device_id, slot), before in zip(decided.items(), map(slots.get, decided), strict=True):
            health = slot.health
            if health is not now or (before is not None and before.health is not was):
                was, now = before.health if before is not None else HEALTHY, health
                is_undated = not now.since and now is not HEALTHY
                is_same = was is now or (was.says_same(now) if is_undated else was == now)
            if before is not None and is_same and (before.device is slot.device or before.device == slot.device):
                continue
            slots[device_id] = slot
            changed.append(device_id)
            if is_undated:
                self._undated.add(device_id)  # `snapshot` dates it
        if changed:
            self._changed.update(changed)
            self.dirty = True

    def drop(self, device_id: str) -> None:
        """Take a slot off the list."""
        if self.slots.pop(device_id, None) is not None:
            self._changed.add(device_id)
            self.dirty = True

    def go_on_from(self, before: Listing) -> None:
        """Take up where the resource's list is, which has been another one's so far: only what differs has changed."""
        decided, self.slots = self.slots, before.slots.copy()
        self._generation, self._listed, self.omitted = before._generation, before._listed, before.omitted
        self._changed, self._undated, self.dirty = before._changed, before._undated, before.dirty
        self.write(decided)
        for device_id in before.slots.keys() - decided.keys():
            self.drop(device_id)

    def snapshot(self, now: float = 0.0, size: int = 0) -> Snapshot:
        """Everything listed now, as a new generation; unclaimed slots beyond the kubelet's limit are left out.

        Args:
            now: monotonic seconds; 0: nothing is dated.
            size: the bytes that the IDs of the devices take of a message; with those of no device it is what all take, or more.
        """
        if self._undated:
            self._date(now)
        self._generation += 1
        changed, self._changed = frozenset(self._changed), set()
        self.dirty = False
        was_partial = self.omitted > 0
        if len(self.slots) > len(self.owners):
            size += sum(_size(self.slots[device_id]) for device_id in self.slots.keys() - self.owners.keys())
        self._listed = self.slots.copy() if size <= limits.MESSAGE_LIMIT else self._fitting()
        self.omitted = len(self.slots) - len(self._listed)
        comparable = None if was_partial or self.omitted else changed
        return Snapshot(self.resource, self._generation, self._listed, comparable, self.omitted)

    def _date(self, now: float) -> None:
        """Date health that has no date, where the slot was listed before; of others the change was not seen."""
        dated: dict[Health, Health] = {}  # the same object for what is alike
        last = was = told = HEALTHY  # a thousand tokens of one device are alike: once is enough
        for device_id in self._undated & self._listed.keys() & self.slots.keys():
            slot = self.slots[device_id]
            health = slot.health
            if health.since or health is HEALTHY:
                continue  # it has been written once more
            before = self._listed[device_id].health
            if health is not last or before is not was:
                last, was = health, before
                if before.says_same(health):
                    told = before
                elif (known := dated.get(health)) is not None:
                    told = known
                else:  # not `replace`, which takes four times as long
                    told = dated[health] = Health(health.state, health.reason, health.message, now, health.while_held)
            self.slots[device_id] = Slot(device_id, slot.device, told)
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


def bytes_of(ids: Iterable[str], numa_node: int | None) -> int:
    """What a device's IDs take of a list; they are of few lengths."""
    lengths = Counter(len(device_id.encode()) for device_id in ids)
    return sum(limits.slot_bytes("x" * length, numa_node) * count for length, count in lengths.items())
