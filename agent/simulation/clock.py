"""The simulated kubelet's clock, which may run faster than the wall's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio


class Clock:
    """Runs the kubelet's long delays (dial timeout, grace period); `speed` of its seconds pass in a real one."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic() * self._speed

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after `seconds` of this clock; what is returned calls it off."""
        return asyncio.get_running_loop().call_later(seconds / self._speed, callback).cancel

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of this clock."""
        over = asyncio.Event()
        call_off = self.call_later(seconds, over.set)
        try:
            await over.wait()
        finally:
            call_off()

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Cancel the body after `seconds` of this clock.

        Raises:
            TimeoutError: that has happened.
        """
        with anyio.CancelScope() as scope:
            call_off = self.call_later(seconds, scope.cancel)
            try:
                yield
            finally:
                call_off()
        if scope.cancelled_caught:
            raise TimeoutError
