from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from agent.simulation.model import Version
from tests.e2e.node import Node
from tests.wait import until


@pytest.fixture
def version() -> Version:
    """Which kubelet; a module whose subject it is has both."""
    return "1.36"


@pytest.fixture
def bare_node(tmp_path: Path, version: Version) -> Node:
    """A node whose kubelet has not started yet."""
    return Node(tmp_path, version=version)


@pytest.fixture
async def node(bare_node: Node) -> AsyncIterator[Node]:
    async with bare_node.kubelet:
        yield bare_node


class Trouble:
    """Backends of a third party, installed in a directory of their own, and what makes each of them misbehave."""

    def __init__(self, root: Path, node: Node) -> None:
        self._root, self._node = root, node
        self.site = root / "site"
        metadata = self.site / "fairlead_troubled-1.0.dist-info"
        metadata.mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("troubled.py"), self.site / "fairlead_troubled.py")
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fairlead-troubled\nVersion: 1.0\n")
        points = "".join(f"troubled{n} = fairlead_troubled:Troubled\n" for n in range(4))
        (metadata / "entry_points.txt").write_text(f"[fairlead.backends]\n{points}")
        for n in range(4):
            (node.dev / f"t{n}").mkdir()
            (root / str(n)).mkdir()
            os.mkfifo(root / str(n) / "release")

    @property
    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": str(self.site)}

    def resource(self, number: int = 0, *more: str) -> str:
        """`fl.test/troubled<number>`, by the backend of that number, with the nodes of /dev/t<number>/."""
        return "\n".join([self._resource(number), *more])

    def _resource(self, number: int) -> str:
        return (
            f'[[resource]]\nname = "fl.test/troubled{number}"\nbackend = "troubled{number}"\n'
            f'nodes = "/dev/t{number}"\norders = "{self._root / str(number)}"\n'
        )

    def order(self, call: str, what: str, number: int = 0) -> None:
        """From its next call on, `hang`, `raise` or answer `nonsense`."""
        order = self._root / str(number) / call
        fresh = order.with_name(f".{call}")
        fresh.write_text(what)
        fresh.rename(order)  # at once: a call may look just now

    def forget(self, call: str, number: int = 0) -> None:
        (self._root / str(number) / call).unlink()

    def calls(self, number: int = 0) -> list[str]:
        """What it was asked so far."""
        return (self._root / str(number) / "calls").read_text().split()

    async def asked(self, call: str, number: int = 0, times: int = 1) -> None:
        """Wait until it has been called; it has read its orders then, and goes on to do what they say."""
        calls = self._root / str(number) / "calls"
        await until(lambda: calls.exists() and calls.read_text().split().count(call) >= times, f"a call of {call}")

    async def release(self, number: int = 0) -> None:
        """Let the call that hangs go on."""
        fifo = self._root / str(number) / "release"
        await asyncio.to_thread(fifo.write_text, "")

    def release_late(self, number: int = 0) -> bool:
        """Let a call go on that has come to hang since; returns whether there was one."""
        try:
            os.close(os.open(self._root / str(number) / "release", os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # ENXIO: nobody reads
            return False
        return True


@pytest.fixture
def trouble(bare_node: Node, tmp_path: Path) -> Trouble:
    return Trouble(tmp_path / "trouble", bare_node)
