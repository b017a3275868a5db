"""Encodes one resource's list, ID by ID: only what changed since the last message is encoded again, when it is to be sent."""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import islice

from agent.kubelet import wire
from agent.model import Slot, Snapshot


class EncodedList:
    """The list as bytes."""

    def __init__(self) -> None:
        self._heads: dict[str, bytes] = {}
        self._items: dict[str, bytes] = {}
        self._slots: Mapping[str, Slot] = {}
        self._generation = 0
        self._changed: set[str] = set()  # since they were encoded
        self._gone: set[str] = set()
        self._message: wire.Encoded | None = None

    def apply(self, snapshot: Snapshot) -> None:
        """Note which IDs this snapshot has changed."""
        self._message = None
        slots = snapshot.slots
        changed: Set[str] | None = snapshot.changed
        if changed is None or snapshot.generation != self._generation + 1:
            changed = self._items.keys() | self._changed | slots.keys()
        self._generation, self._slots = snapshot.generation, slots
        self._gone |= {device_id for device_id in changed if device_id not in slots and device_id in self._items}
        self._changed |= changed

    def encode(self, most: int | None = None) -> bool:
        """Encode `most` of the IDs that changed, or all of them; True if none is left."""
        if most is None or len(self._changed) <= most:
            changed, self._changed = self._changed, set()
        else:
            changed = set(islice(self._changed, most))
            self._changed -= changed
        slots, heads, items = self._slots, self._heads, self._items
        device, health, tail = None, None, b""
        for device_id in changed:
            slot = slots.get(device_id)
            if slot is None:
                heads.pop(device_id, None)
                items.pop(device_id, None)
                continue
            head = heads.get(device_id)
            if head is None:
                head = heads[device_id] = wire.device_head(device_id)
            if slot.health is not health or slot.device is not device:  # 1,000 tokens of one device share them
                device, health = slot.device, slot.health
                tail = wire.device_tail(health.offered, device.numa_node if device else None)
            items[device_id] = wire.list_item(head, tail)
        return not self._changed

    def take_left(self) -> Set[str]:
        """The IDs that were taken off since the last call; they may be back by now."""
        left, self._gone = self._gone, set()
        return left

    def message(self) -> wire.Encoded:
        """The whole list."""
        if self._message is None:
            self.encode()
            self._message = wire.join_list(self._items.values())
        return self._message
