"""Decides when which units are scanned or probed: after hints, on timers, and again where a scan failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Set

from msgspec import Struct, field

from agent.discovery.reading import EVERY_UNIT
from agent.runtime.pacing import Backoff
from backends.base import ALL, All

_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0  # seconds before a failed unit is tried again, doubling


class Todo(Struct):
    """What the next walk covers."""

    everything: bool = False
    units: set[str] = field(default_factory=set)
    """To be looked at."""
    probes: set[str] = field(default_factory=set)
    """Units of which only the health is probed. Never beside units to be looked at."""
    at_a_glance: bool = False
    """Are those only probed that a glance (`Backend.glance`) shows to have changed?"""


class Schedule:
    """The units of one backend that are due, and why."""

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
        self._passed_over = False  # have probes waited for the scan before?
        self.asked = asyncio.Event()
        """Set while something more urgent waits than what `next` returned last: slow reads and probes give way to it."""
        self._retries: dict[str, tuple[float, Backoff]] = {}  # unit → when

    def ask(self, units: Iterable[str] | All) -> None:
        """Have these units looked at as soon as possible."""
        if units is ALL:
            self._todo.everything = True
        else:
            self._todo.units.update(units)
        self.asked.set()

    def put_off(self, probes: Set[str], *, at_a_glance: bool) -> None:
        """Probe these later, which are left of what was to be probed: something more urgent came up."""
        if probes:
            self._todo.probes.update(probes)
            self._todo.at_a_glance = at_a_glance
            self.asked.set()

    def restart(self) -> None:
        """Begin anew, with a look at everything."""
        self._resynced = self._probed = self._glanced = self._clock()
        self._todo.everything = True

    async def next(self, known: Collection[str]) -> Todo:
        """Wait until something is due; the result has units to be looked at, or probes, never both.

        Looks come first. Where one look follows the other, probes get every second turn.
        """
        loop = asyncio.get_running_loop()
        while True:
            self.asked.clear()
            if (seconds := self._due_in(known)) <= 0:
                break
            timer = loop.call_later(seconds, self.asked.set)  # a cancel scope takes 20 us longer, for each event
            try:
                await self.asked.wait()
            finally:
                timer.cancel()
        todo, self._todo = self._todo, Todo()
        has_both = bool(todo.probes and (todo.everything or todo.units))
        if has_both:
            looks, probes = Todo(todo.everything, todo.units), Todo(probes=todo.probes, at_a_glance=todo.at_a_glance)
            todo, self._todo = (probes, looks) if self._passed_over else (looks, probes)
            self.asked.set()
        self._passed_over = has_both and not todo.probes
        return todo

    def _due_in(self, known: Collection[str]) -> float:
        """Add what has become due. Returns the seconds until something is, 0 if something is now.

        The next probes begin when none are left of the last: else units late in the alphabet would never be probed.
        """
        now, todo = self._clock(), self._todo
        if now >= self._resynced + self._resync:
            self._resynced = now
            todo.everything = True
        if now >= self._probed + self._probe and (todo.at_a_glance or not todo.probes):
            self._probed = self._glanced = now
            todo.probes.update(known)
            todo.at_a_glance = False
        if self.poll is not None and now >= self._glanced + self.poll and not todo.probes:
            self._glanced = now
            todo.probes.update(known)
            todo.at_a_glance = bool(known)
        for unit, (at, backoff) in self._retries.items():
            if at <= now:
                self._retries[unit] = (now + backoff.next(), backoff)
                if unit == EVERY_UNIT:
                    todo.everything = True
                else:
                    todo.units.add(unit)
        if todo != Todo():
            return 0.0
        timers = [self._resynced + self._resync, self._probed + self._probe, *(at for at, _ in self._retries.values())]
        if self.poll is not None:
            timers.append(self._glanced + self.poll)
        return min(timers) - now

    def retry(self, unit: str, *, steady: bool = False) -> None:
        """Look at this unit again in a second, and then a little later each time, or each second if `steady`."""
        if steady or unit not in self._retries:
            backoff = Backoff(_RETRY_FIRST, _RETRY_MOST)
            self._retries[unit] = (self._clock() + backoff.next(), backoff)

    def is_well(self, unit: str) -> None:
        """Do not try this unit again: it could be read."""
        self._retries.pop(unit, None)
