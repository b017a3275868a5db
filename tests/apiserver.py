"""An API server of Kubernetes, as far as Fairlead asks one: events, one Node, watches of it, and what dynamic allocation has."""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from agent.simulation.objects import GROUP, Objects, RefusalError
from tests.wait import until

TOKEN: Final = "t0ken"
NODE: Final = "worker-1"
DRAIN: Final = "fairlead.dev/drain"

Object = dict[str, Any]


class ApiServer:
    """One on localhost; while it is stopped, nobody listens at its port."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.token = TOKEN
        self.events: dict[str, Object] = {}
        """By their names, as they are now."""
        self.objects = Objects(NODE)
        """Slices, claims and classes."""
        self.node = self.objects.node
        self.requests: list[str] = []
        """Method and path of each."""
        self.hangs = False
        self.has_policies = True
        """Are dry runs of what the agent may not write refused?"""
        self.refuses: dict[str, int] = {}
        """Method → the status it is refused with."""
        self.page = b""
        """What a proxy answers in its place, with 200, whatever is asked."""
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._port = 0
        self._open: set[asyncio.StreamWriter] = set()
        self._watches: set[asyncio.StreamWriter] = set()

    # --- there or not ---

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port, ssl=self._tls)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._open:
                writer.transport.abort()
            self._server = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ApiServer]:
        await self.start()
        try:
            yield self
        finally:
            await self.stop()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    def kubeconfig(self, file: Path, **user: str) -> Path:
        """A file that leads to it."""
        user = user or {"token": TOKEN}
        document = {
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        file.write_text(json.dumps(document))  # JSON is YAML
        return file

    # --- what a cluster's people do and see ---

    def annotate(self, value: str | None) -> None:
        annotations = self.node["metadata"]["annotations"]
        annotations.pop(DRAIN, None)
        if value is not None:
            annotations[DRAIN] = value
        for writer in self._watches:
            self._tell("MODIFIED", writer)

    def condition(self) -> Object:
        (found,) = self.node["status"]["conditions"] or [{}]
        return dict(found)

    def told(self, reason: str, kind: str = "Node") -> list[Object]:
        """The events of a reason, about the node or a pod."""
        return [it for it in self.events.values() if (it["reason"], it["involvedObject"]["kind"]) == (reason, kind)]

    async def is_told(self, reason: str, kind: str = "Node") -> Object:
        """The first event of a reason, waited for."""
        await until(lambda: self.told(reason, kind), f"an event {reason} about a {kind}", lambda: self.events)
        return self.told(reason, kind)[0]

    # --- HTTP ---

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                while True:
                    await self._request(reader, writer)
        finally:
            self._open.discard(writer)
            self._watches.discard(writer)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = lines[0].split()
        headers = {name.lower(): value for line in lines[1:] if line for name, _, value in [line.partition(": ")]}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append(f"{method} {path}")
        if self.hangs:
            await reader.read()  # until the client has enough
        if self.page:
            self._say(writer, 200, self.page)
        elif headers.get("authorization") != f"Bearer {self.token}":
            self._answer(writer, 401, {"message": "Unauthorized"})
        elif method in self.refuses:
            self._answer(writer, self.refuses[method], {"message": f"{NODE} is forbidden to {method}"})
        elif path.endswith("?dryRun=All"):
            self._answer(writer, *((422, {"message": "denied request"}) if self.has_policies else (200, {})))
        elif path.startswith(GROUP) and "watch=true" in path:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            try:
                await self._until_closed(self.objects.watch(path, lambda it: self._chunk(writer, it)), reader)
            finally:
                writer.close()
        elif path.startswith(GROUP):
            try:
                self._answer(writer, 200, self.objects.do(method, path, json.loads(body) if body else None))
            except RefusalError as error:
                self._answer(writer, error.status, {"message": error.message})
        elif "watch=true" in path:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            self._watches.add(writer)
            if f"metadata.name%3D{NODE}&" in path:
                self._tell("ADDED", writer)
        else:
            self._answer(writer, *self._do(method, path, json.loads(body) if body else {}))

    def _do(self, method: str, path: str, body: Object) -> tuple[int, Object]:
        name = path.rpartition("/")[2]
        match method, path.split("/")[3:]:
            case "GET", ["nodes", _]:
                return 200, self.node
            case "PATCH", ["nodes", _, "status"]:
                (new,) = body["status"]["conditions"]
                others = [it for it in self.node["status"]["conditions"] if it["type"] != new["type"]]
                self.node["status"]["conditions"] = [*others, new]
                return 200, self.node
            case "POST", ["namespaces", namespace, "events"]:
                assert namespace == body["metadata"]["namespace"]
                self.events[body["metadata"]["name"]] = body
                return 201, body
            case "PATCH", ["namespaces", _, "events", _] if name in self.events:
                self.events[name] = self.events[name] | body
                return 200, self.events[name]
        return 404, {"message": f"there is no {path}"}

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: Object) -> None:
        self._say(writer, status, json.dumps(body).encode())

    def _say(self, writer: asyncio.StreamWriter, status: int, data: bytes) -> None:
        writer.write(f"HTTP/1.1 {status} Said\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    async def _until_closed(self, watch: Coroutine[Any, Any, None], reader: asyncio.StreamReader) -> None:
        """Watch until there is nothing more to tell, or the client has gone."""
        watching, gone = asyncio.create_task(watch), asyncio.create_task(reader.read())
        await asyncio.wait((watching, gone), return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        gone.cancel()

    def _tell(self, kind: str, writer: asyncio.StreamWriter) -> None:
        self._chunk(writer, {"type": kind, "object": copy.deepcopy(self.node)})

    def _chunk(self, writer: asyncio.StreamWriter, it: Object) -> None:
        line = json.dumps(it).encode() + b"\n"
        writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
