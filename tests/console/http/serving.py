"""The HTTP face on a real socket, and the plainest of clients."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from agent.console.http.serving import serve
from agent.runtime.counts import Counts
from agent.runtime.problems import Problems
from tests.console.fakes import FakeDaemon
from tests.wait import limit, until


@dataclass
class Health:
    """As it is told."""

    problem: str = ""

    def alive(self) -> str:
        return self.problem


@dataclass
class Served:
    """What is served where, and what one may change about it."""

    path: Path
    daemon: FakeDaemon
    port: int = 0
    """Where it is served over TCP; 0: at the path."""
    health: Health = field(default_factory=Health)
    counts: Counts = field(default_factory=Counts)
    problems: Problems = field(default_factory=Problems)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection, which is closed with the test."""
        if self.port:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        else:
            reader, writer = await asyncio.open_unix_connection(str(self.path), limit=1 << 24)
        self.writers.append(writer)
        return reader, writer

    async def say(self, data: bytes) -> bytes:
        """Everything that is answered to these bytes."""
        reader, writer = await self.connect()
        try:
            writer.write(data)
            async with limit("the answer ends"):
                return await reader.read(-1)
        finally:
            writer.close()

    async def get(self, path: str, method: str = "GET") -> Answer:
        return Answer.parse(await self.say(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))


@dataclass(frozen=True)
class Answer:
    """A response."""

    status: int
    headers: dict[str, str]
    body: str

    @classmethod
    def parse(cls, data: bytes) -> Answer:
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return cls(int(first.split()[1]), headers, body.decode())


@asynccontextmanager
async def served(path: Path, daemon: FakeDaemon, port: int = 0) -> AsyncIterator[Served]:
    """Serve on a unix socket, or over TCP, while in this context."""
    it = Served(path / "http.sock", daemon, port=port)
    async with anyio.create_task_group() as tasks:
        where = f"127.0.0.1:{port}" if port else f"unix:{it.path}"
        tasks.start_soon(serve, daemon, it.health, it.counts, where, (), it.problems)
        await until(lambda: is_listening(port) if port else it.path.exists(), "it is served")
        try:
            yield it
        finally:
            for writer in it.writers:
                writer.close()
            tasks.cancel_scope.cancel()


def free_port() -> int:
    """One that nobody has, nor gets for a connection of theirs before it is taken: those have 32768 and above."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def is_listening(port: int) -> bool:
    """Whether any process listens there."""
    line = f" 0100007F:{port:04X} 00000000:0000 0A "  # proc(5), /proc/net/tcp: LISTEN
    return line in Path("/proc/net/tcp").read_text()
