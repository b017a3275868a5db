"""The machine of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.daemon.node import Node


@pytest.fixture
async def node_alone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """One whose kubelet does not run yet."""
    node = Node(tmp_path_factory.mktemp("n"))
    yield node
    await node.kubelet.stop()
    node.notified.close()
    assert node.kubelet.panics == []


@pytest.fixture
async def node(node_alone: Node) -> Node:
    """One whose kubelet runs."""
    await node_alone.kubelet.start()
    return node_alone
