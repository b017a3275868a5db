"""Paces loops: how often something is done, how long until the next try, how a loop waits for news, and for how long.

Deadlines count only time in which this process ran, not while it was stopped, suspended or starved: while it does not run,
others may not run either, or cannot tell it what they did. Between two looks at the clock no more than `STEP` and `LATE`
together count.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    import anyio

STEP: Final = 0.25
"""Seconds between two looks at the clock."""

LATE: Final = 0.5
"""Seconds by which a look may be late on a busy machine."""


class Credit:
    """`at_once` times at once; each period earns one more."""

    def __init__(self, at_once: int, period: float) -> None:
        """Begin with all of them; `period` is in seconds."""
        self._period = period
        self._lead = (at_once - 1) * period
        self._full = 0.0  # when all of them are there again

    def spend(self, now: float) -> float:
        """Spend one, at this monotonic time in seconds; returns the seconds until the next one, as `wait`."""
        self._full = max(self._full, now) + self._period
        return self._full - self._lead - now

    def wait(self, now: float) -> float:
        """The seconds until the next one may be spent: now, if not above 0."""
        return self._full - self._lead - now


class Backoff:
    """Seconds until the next try: `first`, and after each further failure twice as many, up to `most`."""

    def __init__(self, first: float, most: float = math.inf, chance: Callable[[], float] = lambda: 0.0) -> None:
        """`chance` lengthens each wait, by 1 for twice as long: nodes of a cluster must not all come back at one moment."""
        self._first, self._most, self._chance = first, most, chance
        self.delay = first
        """What comes next, without chance."""

    def next(self, most: float = math.inf) -> float:
        """The seconds to wait now; not above `most`, if the failure is one that is soon over."""
        delay = min(self.delay, most, self._most)
        self.delay = min(delay * 2, most, self._most)
        return delay * (1 + self._chance())

    def reset(self) -> None:
        """It works: the next failure is the first."""
        self.delay = self._first


class Doorbell(asyncio.Event):
    """An event at which a loop waits for news: each `set` is one ring. What rings while the loop is busy, it hears next.

    A timer takes 20 us less than anyio's cancel scopes, at each event.
    """

    async def rung(self, at_most: float = math.inf, *, gather: float = 0.0) -> None:
        """Wait for a ring, and let others come for `gather` seconds; return after `at_most` seconds without one."""
        with self._over(at_most) as over:
            await self.wait()
        if gather and not over:
            await asyncio.sleep(gather)
        self.clear()

    async def until(self, reached: Callable[[], bool], at_most: float = math.inf) -> bool:
        """Look at each ring whether something is so, and wait for it; False where it is not so after `at_most` seconds.

        Where this process stood still, both the ring and the end have come: so it is looked at once more.
        """
        with self._over(at_most) as over:
            while not reached() and not over:
                self.clear()
                await self.wait()
        return reached()

    @contextmanager
    def _over(self, seconds: float) -> Iterator[list[bool]]:
        """Ring after so many seconds in this context; the list has an entry from then on."""
        over: list[bool] = []

        def end() -> None:
            over.append(True)
            self.set()

        timer = None if seconds == math.inf else asyncio.get_running_loop().call_later(seconds, end)
        try:
            yield over
        finally:
            if timer is not None:
                timer.cancel()


class Clock(Struct, frozen=True):
    """What time it is, by two clocks."""

    now: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    wall: Callable[[], float] = time.time
    """Seconds since the epoch."""


SYSTEM: Final = Clock()


class Running:
    """Counts the seconds in which this process ran, as long as it is asked every `STEP` seconds."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._missed = 0.0

    def missed(self, now: float, *, counts: bool = True) -> float:
        """The seconds so far in which the process did not run; without `counts`, all since the last look are among them."""
        self._missed += max(0.0, now - self._last - (STEP + LATE if counts else 0.0))
        self._last = now
        return self._missed


@asynccontextmanager
async def running_timeout(
    seconds: float, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[anyio.CancelScope]:
    """`anyio.fail_after`, for so many seconds in which this process runs.

    Raises:
        TimeoutError: they were not enough.
    """
    import anyio  # noqa: PLC0415  # commands that follow the daemon pace themselves without it

    loop, running = asyncio.get_running_loop(), Running(clock())
    end = loop.time() + seconds
    timer: asyncio.TimerHandle | None = None
    with anyio.CancelScope() as scope:

        def look() -> None:
            nonlocal timer
            left = end + running.missed(clock()) - loop.time()
            if left <= 0:
                scope.cancel()
            else:
                timer = loop.call_later(min(left, STEP), look)

        timer = loop.call_later(min(seconds, STEP), look)
        try:
            yield scope
        finally:
            timer.cancel()
    if scope.cancelled_caught:
        raise TimeoutError
