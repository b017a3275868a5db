"""Where the system has no descriptors, connections wait for them: no traceback each second, no part that restarts."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.e2e.node import Node, chardev
from tests.e2e.process import AgentProcess
from tests.kubelet.transport.frames import PREFACE, SETTINGS, Frame
from tests.wait import limit

HELLO: Final = PREFACE + bytes(Frame(SETTINGS, 0, 0, b""))
ASKED: Final = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextmanager
def no_descriptors(agent: AgentProcess) -> Iterator[None]:
    """The process may open nothing more."""
    before = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        yield
    finally:
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, before)


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    sock.connect(str(path))
    return sock


async def served(sock: socket.socket) -> None:
    """Wait until the other side accepts the connection and says something."""
    async with limit("an answer on a connection that has waited"):
        assert await asyncio.get_running_loop().sock_recv(sock, 1)


async def test_connections_that_wait_are_told_of_once_and_are_served_later(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(chardev(), node.serving) as agent:
        await node.healthy("w1")
        await agent.says("http-served")
        with connected(node.http) as first:  # once it is answered, HTTP has all that it opens
            first.send(ASKED)
            await served(first)
        (plugin,) = (path for path in node.sockets.iterdir() if path.suffix == ".sock")
        with no_descriptors(agent):
            waiting = [connected(path) for path in (plugin, node.admin, node.http)]
            for sock, greeting in zip(waiting, (HELLO, HELLO, ASKED), strict=True):
                sock.send(greeting)
            line = await agent.says("connections-wait")
            assert line["reason"] == "Too many open files"
        for sock in waiting:
            await served(sock)
            sock.close()
        assert len(agent.said("connections-wait")) <= 2, "asyncio's servers, and HTTP's"
        assert not [said for said in agent.log if "accept" in said["event"]]
        assert not agent.said("part-restarts", part="HTTP")
        assert not agent.said("part-restarts", part="admin socket")
