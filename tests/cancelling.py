"""Cuts what waits off at each of its waits in turn, and sees what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from tests.wait import limit, until


class Cut:
    """Waits for a coroutine, and cancels whoever does so at its n-th wait."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int) -> None:
        self._coroutine = coroutine
        self._at = at

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, error, waits = self._coroutine.__await__(), None, 0
        while True:
            try:
                waited = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            waits += 1
            task = asyncio.current_task()
            if waits == self._at and task is not None:
                asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield waited
                error = None
            except BaseException as thrown:  # noqa: BLE001  # handed on to where it belongs
                error = thrown


async def cancelled_everywhere(
    make: Callable[[], Coroutine[Any, Any, Any]], after: Callable[[], Awaitable[None]], most: int = 1000
) -> int:
    """Run it again and again, cut off one wait later each time, until it ends by itself or has waited `most` times.

    After each, `after` says whether all is as it should be; no task and no file is left open.

    Returns:
        how often it was cut off.
    """
    tasks, files = asyncio.all_tasks(), _open_files()
    for at in count(1):

        async def run(at: int = at) -> None:
            await Cut(make(), at)

        task = asyncio.ensure_future(run())
        async with limit(f"it ends, cut off at wait {at}"):
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()
            return at - 1
        await after()
        await until(lambda: asyncio.all_tasks() <= tasks, f"no task is left after wait {at}", asyncio.all_tasks)
        await until(lambda: _open_files() <= files, f"no file is left open after wait {at}", _open_files)
        if at == most:
            return at
    raise AssertionError


def _open_files() -> set[str]:
    """The descriptors, each with what it is."""
    gc.collect()
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing
            found.add(f"{descriptor.name} {descriptor.readlink()}")
    return found
