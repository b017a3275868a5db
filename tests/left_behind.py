"""Fails a test that leaves a task running or a connection to the garbage collector."""

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest


@pytest.fixture(autouse=True)
async def nothing_left_behind(anyio_backend: str) -> AsyncIterator[None]:
    """No task outlives a test, and no connection is left to the garbage collector (a ResourceWarning is an error)."""
    gc.freeze()  # what was there before is none of the test's, and takes a collection 100 ms
    yield
    await asyncio.sleep(0)
    left = {task for task in asyncio.all_tasks() if "TestRunner" not in repr(task.get_coro())}
    assert not left
    gc.collect()
    gc.unfreeze()
