"""The agent's monotonic clock: with each SIGUSR1 a second passes, so that deadlines come when a test wants.

It passes a few turns of the event loop later: what the second before has made due is done first, however busy the
machine is.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from typing import Final

_TURNS: Final = 20


class _Clock:
    def __init__(self) -> None:
        self._real = time.monotonic
        self._passed = 0
        self._turning = False

    def now(self) -> float:
        return self._real() + self._passed

    def signalled(self, *_: object) -> None:
        with suppress(RuntimeError):  # it starts just now, or ends
            loop = asyncio.get_running_loop()
            if not self._turning:
                self._turning = True
                loop.call_soon_threadsafe(self._turn, loop, _TURNS)

    def _turn(self, loop: asyncio.AbstractEventLoop, left: int) -> None:
        if left:
            loop.call_soon(self._turn, loop, left - 1)
        else:
            self._passed += 1
            self._turning = False


def install() -> None:
    """Take the place of time.monotonic for all that is imported from now on, the event loop's clock too."""
    clock = _Clock()
    time.monotonic = clock.now
    signal.signal(signal.SIGUSR1, clock.signalled)
