"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from agent.simulation.clock import Clock
from tests.wait import limit


class ManualClock(Clock):
    """Time passes only in `advance`; `awaited` waits until somebody waits for the clock."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._off: set[int] = set()
        self._news = asyncio.Event()

    def now(self) -> float:
        return self._now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        key = next(self._order)
        heapq.heappush(self._timers, (self._now + seconds, key, callback))
        self._news.set()
        return lambda: self._off.add(key)

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass; what is due is called in its order."""
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            self._now, key, callback = heapq.heappop(self._timers)
            if key not in self._off:
                callback()
        self._now = end

    def pending(self) -> list[float]:
        """Seconds until each timer that is still on."""
        return sorted(when - self._now for when, key, _ in self._timers if key not in self._off)

    async def awaited(self, seconds: float) -> None:
        """Wait until a timer for `seconds` from now is on."""
        async with limit(f"a timer for {seconds} s", self.pending):
            while seconds not in self.pending():
                self._news.clear()
                await self._news.wait()
