"""The tasks of one kubelet process: started anywhere, ended together, their errors never lost."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

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
