"""The agent's monotonic clock: with each SIGUSR1 a second passes, so that deadlines come when a test wants.

It passes in steps, with a few turns of the event loop between them: what one step has made due is done first, however
busy the machine is. With SIGUSR2 a minute passes at once, as where the agent is stopped and goes on.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from typing import Final

_STEPS: Final = 5
"""Of one second; agent.runtime.pacing takes longer ones for time in which the agent did not run."""

_TURNS: Final = 20  # of the event loop between two steps


class _Clock:
    def __init__(self) -> None:
        self._real = time.monotonic
        self._passed = 0.0
        self._turning = False

    def now(self) -> float:
        return self._real() + self._passed

    def signalled(self, *_: object) -> None:
        with suppress(RuntimeError):  # it starts just now, or ends
            loop = asyncio.get_running_loop()
            if not self._turning:
                self._turning = True
                loop.call_soon_threadsafe(self._turn, loop, _STEPS * _TURNS)

    def _turn(self, loop: asyncio.AbstractEventLoop, left: int) -> None:
        if left % _TURNS == 0 and left < _STEPS * _TURNS:
            self._passed += 1 / _STEPS
        if left:
            loop.call_soon(self._turn, loop, left - 1)
        else:
            self._turning = False

    def stood_still(self, *_: object) -> None:
        self._passed += 60


def install() -> None:
    """Take the place of time.monotonic for all that is imported from now on, the event loop's clock too."""
    clock = _Clock()
    time.monotonic = clock.now
    signal.signal(signal.SIGUSR1, clock.signalled)
    signal.signal(signal.SIGUSR2, clock.stood_still)
