"""What one simulated kubelet process runs by: a clock, which may be faster than the wall's, and tasks that end together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

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


_CANCEL_AGAIN: Final = 1.0  # seconds


class Background:
    """A set of running tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._errors: list[BaseException] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it until it ends or `stop` is called."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)

    async def stop(self) -> None:
        """Cancel what runs and wait for it.

        Raises:
            BaseExceptionGroup: tasks have failed since the start.
        """
        running = set(self._tasks)
        while running:  # grpclib takes a cancellation for a lost connection where both come at once
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=_CANCEL_AGAIN)
        errors, self._errors = self._errors, []
        if errors:
            raise BaseExceptionGroup("tasks of the simulated kubelet failed", errors)
