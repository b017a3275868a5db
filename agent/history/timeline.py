"""Keeps the changes of each device, within a bound, and folds them into the periods of the last 24 hours. Pure.

Only changes are kept: a device that was healthy and free all the time has none. Wall clock times are, as the clock had them;
the order is that in which they were noted. Where the clock was set back, what lies behind what follows is drawn together,
and the last change is never after now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import msgspec
from msgspec.structs import replace

SPAN: Final = 86400.0
"""Seconds that are shown, and kept."""

HEALTHY, DEGRADED, UNHEALTHY = "Healthy", "Degraded", "Unhealthy"
DRAINED: Final = "Drained"
"""Unhealthy, since an operator or a rule took it out of service."""
GONE: Final = "Gone"
"""On no list, whatever the reason, or kept there for the pod that holds it: its device is gone (`ownership.HELD_AND_GONE`)."""
UNKNOWN: Final = "Unknown"

_MOMENT: Final = 0.001  # seconds that it has been as it is now, at least
_NOT_RUNNING: Final = "Fairlead did not run"
_FORGOTTEN: Final = "it is not kept any more: too much has happened since"


class Condition(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """How a device is, and who has it."""

    state: str = HEALTHY
    reason: str = ""
    message: str = ""
    holders: tuple[str, ...] = ()
    """Pods, as `namespace/name`."""


WELL: Final = Condition()
"""Healthy and free, as a device is of which nothing is noted."""


class Change(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A device came to be so; written to the state file as an array."""

    resource: str
    device: str
    """Its key."""
    time: float
    """Seconds since the epoch."""
    condition: Condition
    before: str = ""
    """Of the first that is known of a device: the state that it was in before; else nothing."""


class Note(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Something happened to a piece of hardware that changed no health: an XID of an application."""

    hardware: str
    reason: str
    message: str
    time: float
    """Seconds since the epoch."""
    count: int = 1
    pid: int | None = None
    """The process, as the host numbers it; None: not said."""
    process: str = ""
    pods: tuple[str, ...] = ()
    """Whose it was, as `namespace/name`; several: any of these."""


class Run(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """When a daemon watched; seconds since the epoch."""

    began: float
    ended: float


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept over restarts: all changes, or those that came since an earlier record."""

    changes: tuple[Change, ...] = ()
    """Each device's in their order."""
    runs: tuple[Run, ...] = ()
    notes: tuple[Note, ...] = ()

    def since(self, earlier: Record) -> Record:
        """Without the changes and notes that the earlier record has, the very same objects."""
        known = set(map(id, (*earlier.changes, *earlier.notes)))
        changes = tuple(it for it in self.changes if id(it) not in known)
        return Record(changes, self.runs, tuple(it for it in self.notes if id(it) not in known))

    def after(self, earlier: Record | None) -> Record:
        """With the changes and notes of the earlier record before its own."""
        if earlier is None:
            return self
        return Record((*earlier.changes, *self.changes), self.runs, (*earlier.notes, *self.notes))


class Period(msgspec.Struct, frozen=True, gc=False):
    """From when until when a device was so; seconds since the epoch."""

    begins: float
    ends: float
    condition: Condition


def periods(changes: Sequence[Change], runs: Sequence[Run], now: float) -> list[Period]:
    """The last 24 hours without a gap, in their order; what no daemon watched is Unknown.

    Args:
        changes: of one device, in the order in which they were noted.
        runs: of the daemon, in their order.
        now: seconds since the epoch.
    """
    begin = now - SPAN
    starts = [begin, *(max(begin, it) for it in _in_order([it.time for it in changes], now - _MOMENT)), now]
    conditions = [_before(changes), *(it.condition for it in changes)]
    told = [
        Period(start, end, it) for (start, end), it in zip(pairwise(starts), conditions, strict=True) if start < end
    ]
    watched = list(_watched(runs, begin, now))
    return list(_without_gaps(told, watched))


def kept(changes: Sequence[Change], now: float) -> Sequence[Change]:
    """The changes that the last 24 hours are made of; nothing if it was healthy and free, or gone, all the time."""
    times = _in_order([it.time for it in changes], now)
    older = sum(it <= now - SPAN for it in times)
    if older == len(changes) and (not changes or _is_plain(changes[-1].condition)):
        return ()
    return changes[max(0, older - 1) :]


def _is_plain(condition: Condition) -> bool:
    return condition == WELL or (condition.state == GONE and not condition.holders)


def _before(changes: Sequence[Change]) -> Condition:
    """How it was before the first change."""
    if not changes or changes[0].before == HEALTHY:
        return WELL
    if changes[0].before == GONE:
        return Condition(GONE)
    return Condition(UNKNOWN, message=_FORGOTTEN)


def _in_order(times: Sequence[float], now: float) -> list[float]:
    """The times, none later than those that follow, nor than now."""
    ordered = [now]
    for time in reversed(times):
        ordered.append(min(time, ordered[-1]))
    return ordered[:0:-1]


def _watched(runs: Sequence[Run], begin: float, now: float) -> Iterator[tuple[float, float]]:
    """What of the time since `begin` was watched."""
    times = _in_order([time for run in runs for time in (run.began, run.ended)], now)
    for start, end in zip(times[::2], times[1::2], strict=True):
        if max(start, begin) < end:
            yield max(start, begin), end


def _without_gaps(told: Sequence[Period], watched: Sequence[tuple[float, float]]) -> Iterator[Period]:
    """The periods, where a daemon watched; between these, Unknown."""
    unknown, at = Condition(UNKNOWN, message=_NOT_RUNNING), told[0].begins
    for start, end in watched:
        if at < start:
            yield Period(at, start, unknown)
        whole = [Period(max(it.begins, start), min(it.ends, end), it.condition) for it in told]
        yield from (it for it in whole if it.begins < it.ends)
        at = end
    if at < told[-1].ends:
        yield Period(at, told[-1].ends, unknown)


# --- all changes of all devices, within a bound ---


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
            appeared: whether it was not there before; heeded only where nothing is known of it.
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
