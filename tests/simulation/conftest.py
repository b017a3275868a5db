from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.simulation.kubelet import Kubelet
from tests.left_behind import nothing_left_behind

__all__ = ["kubelet", "nothing_left_behind"]


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[Kubelet]:
    async with Kubelet(tmp_path) as kubelet:
        yield kubelet
