"""Runs something beside a test, and ends it with the test's block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import anyio


@asynccontextmanager
async def running(main: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """It runs inside the block; what it raises ends the block."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(main)
        yield
        tasks.cancel_scope.cancel()
