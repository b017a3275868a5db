"""Keeps the changes of all devices, within a bound: for each device and in all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from agent.history.timeline import GONE, HEALTHY, SPAN, WELL, Change, Condition, kept

PER_DEVICE: Final = 100
"""Changes of one device; the oldest goes first."""

IN_ALL: Final = 10_000
"""Changes that are past, of all devices: 5 MB in memory and 2 MB in the state file; the one that ended first goes first.

Beside them stands, for each device that is listed and not simply healthy and free, how it is: as much for each.
"""

Key = tuple[str, str]
"""Resource and the device's key."""


class Book:
    """The changes, by their devices."""

    def __init__(self) -> None:
        self._changes: dict[Key, tuple[Change, ...]] = {}
        self._past: dict[int, Change] = {}  # by id(): what may be forgotten, the oldest first
        self._lost = -SPAN  # when a device went of which nothing is kept any more, though its day has not passed

    def restore(self, changes: Iterable[Change]) -> None:
        """Have these, in the order in which they were noted for each device, and no others."""
        self._changes.clear()
        self._past.clear()
        for it in changes:
            self._add(it)

    def devices(self) -> Collection[Key]:
        """The devices of which there is something to tell."""
        return self._changes.keys()

    def of(self, key: Key) -> Sequence[Change]:
        """A device's changes, in their order."""
        return self._changes.get(key, ())

    def now(self, key: Key) -> Condition:
        """How it is."""
        changes = self._changes.get(key)
        return changes[-1].condition if changes else WELL

    def note(self, key: Key, condition: Condition, time: float, *, appeared: bool = False) -> bool:
        """A device is so now; False if it was so before.

        Args:
            key: the device's.
            condition: how it is.
            time: seconds since the epoch.
            appeared: was it not there before? Asked of a device of which nothing is known.
        """
        changes = self._changes.get(key)
        if changes is None and appeared:
            self._add(Change(*key, time, condition, "" if time - self._lost < SPAN else GONE))
        elif condition == self.now(key):
            return False
        else:
            self._add(Change(*key, time, condition, "" if changes else HEALTHY))
        return True

    def forget(self, keys: Iterable[Key], now: float) -> None:
        """Drop what these devices' last 24 hours are not made of."""
        for key in keys:
            self._keep(key, len(kept(self.of(key), now)))

    def all(self) -> Iterator[Change]:
        """All changes; each device's are in their order."""
        for changes in self._changes.values():
            yield from changes

    def _add(self, change: Change) -> None:
        key = change.resource, change.device
        changes = self._changes.get(key, ())
        for it in changes:
            if it.condition == change.condition:  # a message is kept once, however often it comes
                change = replace(change, condition=it.condition)
                break
        if changes:
            self._past.setdefault(id(changes[-1]), changes[-1])
        self._changes[key] = (*changes, change)
        if change.condition.state == GONE:  # it may never be followed by another
            self._past[id(change)] = change
        self._keep(key, PER_DEVICE)
        while len(self._past) > IN_ALL:
            oldest = next(iter(self._past.values()))
            key = oldest.resource, oldest.device
            self._keep(key, len(self._changes[key]) - 1)
            if key not in self._changes:
                self._lost = oldest.time

    def _keep(self, key: Key, number: int) -> None:
        """Drop all but so many of a device's last changes."""
        changes = self._changes.get(key, ())
        split = max(0, len(changes) - number)
        for it in changes[:split]:
            self._past.pop(id(it), None)
        if left := changes[split:]:
            self._changes[key] = left
        else:
            self._changes.pop(key, None)
