"""Waits for slow reads beside the walk over the other units, and says which of them hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Set
from typing import Any, Final

from msgspec import Struct

from agent.discovery.unit_walk import Walk
from agent.runtime.patience import STEP, Running

OVERTAKEN: Final = 0.1
"""Seconds that the other units wait for a slow read."""


class Slow(Struct, frozen=True):
    """A slow read that has ended, or hangs."""

    unit: str
    found: Walk
    """What it has found of this unit."""
    hangs: asyncio.Future[None] | None
    """The thread's job, if it hangs."""


class Overtaken:
    """Slow reads under way."""

    def __init__(self) -> None:
        self._slow: dict[str, tuple[Walk, asyncio.Future[None]]] = {}
        self._running = Running(0.0)
        self._missed = 0.0

    @property
    def units(self) -> Set[str]:
        """What is being read."""
        return self._slow.keys()

    def add(self, unit: str, walk: Walk, job: asyncio.Future[None]) -> None:
        """The thread of this walk is slow at this unit, and ends with it."""
        if not self._slow:
            self._running, self._missed = Running(walk.since + OVERTAKEN), 0.0
        self._slow[unit] = walk, job

    def _let_pass(self, now: float) -> None:
        """Time in which we did not run is no read's fault."""
        before, self._missed = self._missed, self._running.missed(now)
        for walk, _ in self._slow.values():
            walk.since += self._missed - before

    async def ended(self, deadline: float, clock: Callable[[], float], urgent: asyncio.Event) -> AsyncIterator[Slow]:
        """Each that ends, or hangs for so many seconds; until there are none, or something urgent comes up."""
        while self._slow and not urgent.is_set():
            unit, (walk, job) = min(self._slow.items(), key=lambda it: it[1][0].since)
            now = clock()
            self._let_pass(now)
            left = walk.since + deadline - now
            if not job.done() and left > 0:
                await _first([job for _, job in self._slow.values()], urgent, min(left, STEP))
                unit, (walk, job) = next((it for it in self._slow.items() if it[1][1].done()), (unit, self._slow[unit]))
                if not job.done():
                    continue
            del self._slow[unit]
            found = walk.only(unit)
            is_told = job.done() or found.looks or found.failures or found.probes
            yield Slow(unit, found, None if is_told else job)


async def wait(walk: Walk, job: asyncio.Future[None], seconds: float) -> None:
    """Wait for a walk's thread for so long; who gives up waiting gives up the walk."""
    try:
        await asyncio.wait([job], timeout=seconds)
    except asyncio.CancelledError:
        walk.abandoned = True
        job.cancel()
        raise


async def _first(jobs: list[asyncio.Future[None]], urgent: asyncio.Event, seconds: float) -> None:
    waiting: asyncio.Future[Any] = asyncio.ensure_future(urgent.wait())
    every: list[asyncio.Future[Any]] = [*jobs, waiting]
    try:
        await asyncio.wait(every, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
