import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.simulation.kubelet import Kubelet


@pytest.fixture(autouse=True)
async def nothing_left_behind(anyio_backend: str) -> AsyncIterator[None]:
    """No task outlives a test, and no connection is left to the garbage collector (a ResourceWarning is an error)."""
    yield
    left = {task for task in asyncio.all_tasks() if "TestRunner" not in repr(task.get_coro())}
    assert not left
    gc.collect()


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[Kubelet]:
    async with Kubelet(tmp_path) as kubelet:
        yield kubelet
