"""An API server on a port of this machine, which has the objects of `objects`: what a driver of dynamic allocation needs of one."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, Self

from msgspec import Struct

from agent.simulation.objects import GROUP, Object, Objects, RefusalError

TOKEN: Final = "t0ken"  # noqa: S105  # nothing is behind it


class Request(Struct, frozen=True):
    """What is asked."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Object | None


class ApiServer:
    """One on localhost; while it is stopped, nobody listens at its port."""

    def __init__(self, node: str, tls: ssl.SSLContext | None = None) -> None:
        self.token = TOKEN
        self.objects = Objects(node)
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._port = 0
        self._open: set[asyncio.StreamWriter] = set()

    # --- there or not ---

    async def start(self) -> None:
        """Listen, at the port of the last time."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port, ssl=self._tls)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Go, with all connections."""
        if self._server is not None:
            self._server.close()
            for writer in self._open:
                writer.transport.abort()
            self._server = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """It is there meanwhile."""
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    def kubeconfig(self, file: Path, **user: str) -> Path:
        """Write a file that leads to it."""
        document = {
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": user or {"token": self.token}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        file.write_text(json.dumps(document))  # JSON is YAML
        return file

    # --- HTTP ---

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                    method, path, _ = lines[0].split()
                    pairs = (line.partition(": ") for line in lines[1:] if line)
                    headers = {name.lower(): value for name, _, value in pairs}
                    body = await reader.readexactly(int(headers.get("content-length", 0)))
                    asked = Request(method, path, headers, json.loads(body) if body else None)
                    await self._respond(asked, reader, writer)
        finally:
            self._left(writer)
            writer.close()

    def _left(self, writer: asyncio.StreamWriter) -> None:
        self._open.discard(writer)

    def _knows(self, asked: Request) -> bool:
        return asked.headers.get("authorization") == f"Bearer {self.token}"

    async def _respond(self, asked: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._knows(asked):
            self._answer(writer, 401, {"message": "Unauthorized"})
        elif asked.path.startswith(GROUP) and "watch=true" in asked.path:
            self._begin(writer)
            try:
                await self._until_closed(self.objects.watch(asked.path, lambda it: self._chunk(writer, it)), reader)
            finally:
                writer.close()
        else:
            try:
                self._answer(writer, 200, self.objects.do(asked.method, asked.path, asked.body))
            except RefusalError as error:
                self._answer(writer, error.status, {"message": error.message})

    async def _until_closed(self, watch: Coroutine[Any, Any, None], reader: asyncio.StreamReader) -> None:
        """Watch until there is nothing more to tell, or the client has gone."""
        watching, gone = asyncio.create_task(watch), asyncio.create_task(reader.read())
        await asyncio.wait((watching, gone), return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        gone.cancel()

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: Object) -> None:
        self._say(writer, status, json.dumps(body).encode())

    def _say(self, writer: asyncio.StreamWriter, status: int, data: bytes) -> None:
        writer.write(f"HTTP/1.1 {status} Said\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    def _begin(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")

    def _chunk(self, writer: asyncio.StreamWriter, it: Object) -> None:
        line = json.dumps(it).encode() + b"\n"
        writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
