"""Waits for slow reads while another thread goes on with the other units, and says which of them hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from msgspec import Struct

from agent.discovery.schedule import EVERY_UNIT
from agent.discovery.unit_walk import Walk
from agent.runtime.running_time import STEP, Running

SLOW_AFTER: Final = 0.1
"""Seconds after which a read is slow: the other units do not wait for it any longer."""


class Slow(Struct, frozen=True):
    """A slow read that has ended, or hangs."""

    unit: str
    found: Walk
    """What was found of this unit."""
    hangs: asyncio.Future[None] | None
    """The thread's job, if it hangs."""


class SlowReads:
    """Slow reads under way."""

    def __init__(self) -> None:
        self.reads: dict[str, tuple[Walk, asyncio.Future[None]]] = {}
        """Unit → the walk whose thread reads it, and that thread's job."""
        self._running = Running(0.0)
        self._missed = 0.0

    async def watch(
        self, walk: Walk, job: asyncio.Future[None], began: float, deadline: float, clock: Callable[[], float]
    ) -> str | None:
        """Wait for a walk's thread until it ends, or is at one unit for so long that the walk is abandoned.

        Args:
            walk: what the thread writes; where its read is slow, it is one of `reads` from then on.
            job: the thread's.
            began: when it was started.
            deadline: seconds after which a read is taken to hang.
            clock: the time in seconds.

        Returns:
            the unit whose read hangs, `EVERY_UNIT` if listing them does; None if none does.
        """
        running, missed, passed = Running(began), 0.0, 0.0
        while not job.done():
            # in this order, since the thread sets the time first: a later unit is never blamed
            unit, since = walk.unit, walk.since
            now = clock()
            before, passed = passed, running.missed(now)
            if since != began:  # what was missed since the last turn may have been this unit's time
                began, missed = since, passed - min(passed - before, now - since)
            lasts = now - since - (passed - missed)
            if lasts >= deadline:
                walk.abandoned = True
                return unit or EVERY_UNIT
            if unit is not None and lasts >= SLOW_AFTER:
                walk.abandoned = True
                walk.since = now - lasts  # without the time in which we did not run
                if not self.reads:
                    self._running, self._missed = Running(walk.since + SLOW_AFTER), 0.0
                self.reads[unit] = walk, job
                return None
            await asyncio.wait([job], timeout=SLOW_AFTER)
        return None

    def _let_pass(self, now: float) -> None:
        """Give every read the time in which this process did not run."""
        before, self._missed = self._missed, self._running.missed(now)
        for walk, _ in self.reads.values():
            walk.since += self._missed - before

    async def ended(self, deadline: float, clock: Callable[[], float], urgent: asyncio.Event) -> AsyncIterator[Slow]:
        """Yield each read that ends, or that hangs for `deadline` seconds; until none is left or `urgent` is set."""
        while self.reads and not urgent.is_set():
            unit, (walk, job) = min(self.reads.items(), key=lambda it: it[1][0].since)
            now = clock()
            self._let_pass(now)
            left = walk.since + deadline - now
            if not job.done() and left > 0:
                await _first([job for _, job in self.reads.values()], urgent, min(left, STEP))
                unit, (walk, job) = next((it for it in self.reads.items() if it[1][1].done()), (unit, self.reads[unit]))
                if not job.done():
                    continue
            del self.reads[unit]
            found = walk.only(unit)
            is_told = job.done() or found.looks or found.failures or found.probes
            yield Slow(unit, found, None if is_told else job)


async def _first(jobs: list[asyncio.Future[None]], urgent: asyncio.Event, seconds: float) -> None:
    waiting: asyncio.Future[Any] = asyncio.ensure_future(urgent.wait())
    every: list[asyncio.Future[Any]] = [*jobs, waiting]
    try:
        await asyncio.wait(every, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
