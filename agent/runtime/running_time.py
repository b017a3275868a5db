"""Keeps deadlines that count only time in which this process ran: not while it was stopped, suspended or starved.

While it does not run, others may not run either, or cannot tell it what they did. Between two looks at the clock no more
than `STEP` and `LATE` together count: in the rest of that time this process did not run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

import anyio
from msgspec import Struct

STEP: Final = 0.25
"""Seconds between two looks at the clock."""

LATE: Final = 0.5
"""Seconds by which a look may be late on a busy machine."""


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
        """The seconds so far in which the process did not run; `counts`: does the time since the last look count at all?"""
        self._missed += max(0.0, now - self._last - (STEP + LATE if counts else 0.0))
        self._last = now
        return self._missed


@asynccontextmanager
async def timeout(seconds: float, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[anyio.CancelScope]:
    """`anyio.fail_after`, for so many seconds in which this process runs.

    Raises:
        TimeoutError: they were not enough.
    """
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
