"""Decides when to scan which units again: after hints, on timers, and where a scan failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Final

import anyio
from msgspec import Struct, field

from backends.base import ALL, All

_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0  # seconds before a failed unit is tried again, doubling
EVERY_UNIT: Final = ""
"""Stands for the backend as a whole where a unit's name is due."""


class Todo(Struct):
    """What the next walk covers."""

    everything: bool = False
    units: set[str] = field(default_factory=set)
    """To be looked at."""
    probes: set[str] = field(default_factory=set)
    """Of which only the health is looked at; only where there is nothing to be looked at."""
    glances: set[str] = field(default_factory=set)
    """The same, and of these no more than a glance is taken."""
    one: bool = False
    """Of these only one unit: something more urgent is to follow."""


class Schedule:
    """The reasons to look at one backend's units, as they come up."""

    def __init__(self, resync: float, probe: float, clock: Callable[[], float]) -> None:
        """Prepare.

        Args:
            resync: seconds between two looks at everything.
            probe: seconds between two probes of all that is known.
            clock: the time in seconds.
        """
        self.poll: float | None = None
        """Seconds between two glances that the backend asks for."""
        self._clock = clock
        self._resync, self._probe = resync, probe
        self._resynced = self._probed = self._glanced = clock()
        self._todo = Todo()
        self._passed_over = False  # have probes waited for the last look?
        self.asked = asyncio.Event()
        """Set when something is to be looked at before what is due by time."""
        self._retries: dict[str, tuple[float, float]] = {}  # unit → when, the delay after that

    def ask(self, units: Iterable[str] | All) -> None:
        """These are to be looked at, as soon as possible."""
        if units is ALL:
            self._todo.everything = True
        else:
            self._todo.units.update(units)
        self.asked.set()

    def put_off(self, probes: Iterable[str], glances: Iterable[str]) -> None:
        """These were to be probed, and those glanced at, and something more urgent came up."""
        self._todo.probes.update(probes)
        self._todo.glances.update(glances)
        self.asked.set()

    def restart(self) -> None:
        """Begin with a look at everything."""
        self._resynced = self._probed = self._glanced = self._clock()
        self._todo.everything = True

    async def next(self, known: Collection[str]) -> Todo:
        """Wait for a reason to look; either units or probes are to be done.

        Looks come first, but where they never end, because each has brought the next, probes get their turn between.
        """
        while True:
            self.asked.clear()
            if self._is_due(known):
                break
            with anyio.move_on_after(max(0.0, self._deadline() - self._clock())):
                await self.asked.wait()
        todo, self._todo = self._todo, Todo()
        looks, probes = bool(todo.everything or todo.units), bool(todo.probes or todo.glances)
        if looks and probes and self._passed_over:
            self._todo = Todo(todo.everything, todo.units)
            todo = Todo(probes=todo.probes, glances=todo.glances, one=True)
        elif looks and probes:
            self._todo = Todo(probes=todo.probes, glances=todo.glances)
            todo = Todo(todo.everything, todo.units)
        self._passed_over = looks and probes and not todo.one
        if self._todo != Todo():
            self.asked.set()  # what waits for slow reads ends that: there is more to do
        return todo

    def _is_due(self, known: Collection[str]) -> bool:
        """See what has become due; is there anything to do?

        What is left of the last probes comes first: else what is late in the alphabet would never be probed again.
        """
        now = self._clock()
        if now >= self._resynced + self._resync:
            self._resynced = now
            self._todo.everything = True
        if now >= self._probed + self._probe and not self._todo.probes:
            self._probed = self._glanced = now
            self._todo.probes.update(known)
        if self.poll is not None and now >= self._glanced + self.poll and not self._todo.glances:
            self._glanced = now
            self._todo.glances.update(known)
        for unit, (at, delay) in self._retries.items():
            if at <= now:
                self._retries[unit] = (now + delay, min(delay * 2, _RETRY_MOST))
                if unit == EVERY_UNIT:
                    self._todo.everything = True
                else:
                    self._todo.units.add(unit)
        return self._todo != Todo()

    def _deadline(self) -> float:
        timers = [self._resynced + self._resync, self._probed + self._probe]
        if self.poll is not None:
            timers.append(self._glanced + self.poll)
        return min(*timers, *(at for at, _ in self._retries.values()))

    def retry(self, unit: str, *, failed: bool, steady: bool = False) -> None:
        """A look at this unit failed, and is tried again a little later each time, or each second if `steady`; or did not."""
        if not failed:
            self._retries.pop(unit, None)
        elif steady or unit not in self._retries:
            self._retries[unit] = (self._clock() + _RETRY_FIRST, _RETRY_FIRST * 2)
