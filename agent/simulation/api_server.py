"""An API server: objects with versions and watches of them, and HTTP to them, as far as slices, claims and classes need it.

As the real one does it (k8s.io/apiserver, and the project's DRA contract): names are unique, a replacement must name the version
that it replaces, a watch begins behind a version, and one that is too long ago is refused with 410.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

from msgspec import Struct

Object = dict[str, Any]
GROUP: Final = "/apis/resource.k8s.io/v1"


class RefusalError(Exception):
    """What is answered in place of an object."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Objects:
    """The objects of resource.k8s.io, and one Node."""

    def __init__(self, node: str) -> None:
        self.node: Object = {
            "metadata": {"name": node, "uid": "uid-of-the-node", "annotations": {}},
            "status": {"conditions": []},
        }
        self.kept: dict[str, Object] = {}
        """By their paths below the group: `resourceslices/NAME`, `namespaces/NS/resourceclaims/NAME`."""
        self.writes: list[tuple[str, str]] = []
        """Method and path of each change that was made by a request."""
        self.refuses: Callable[[str, str], int | None] = lambda _method, _path: None
        """The status with which a request is refused."""
        self.knows_taints = True
        """Else they are dropped, as where the feature gate is off."""
        self.forgotten = 0
        """The version before which watches cannot begin."""
        self._version = 100
        self._told: list[tuple[int, str, str, Object]] = []
        self._news = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def slices(self) -> dict[str, Object]:
        """The ResourceSlices by their names."""
        return {path.rpartition("/")[2]: it for path, it in self.kept.items() if path.startswith("resourceslices/")}

    def whole(self) -> list[Object]:
        """What slices say that a scheduler uses: of a pool those of its newest generation, and only if all are there."""
        by_pool: dict[tuple[str, str], list[Object]] = {}
        for it in self.slices.values():
            by_pool.setdefault((it["spec"]["driver"], it["spec"]["pool"]["name"]), []).append(it["spec"])
        found = []
        for of in by_pool.values():
            newest = max(it["pool"]["generation"] for it in of)
            there = [it for it in of if it["pool"]["generation"] == newest]
            if len(there) == there[0]["pool"]["resourceSliceCount"]:
                found += there
        return found

    def pool(self, name: str) -> list[Object]:
        """The devices that a scheduler sees of a pool: none while a slice of its newest generation is missing."""
        there = (it for it in self.whole() if it["pool"]["name"] == name)
        return sorted((device for it in there for device in it.get("devices", ())), key=lambda it: str(it["name"]))

    def subscribe(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call the listener after each change, until what is returned is called."""
        self._listeners.append(listener)
        return partial(self._listeners.remove, listener)

    # --- what others do ---

    def put(self, path: str, it: Object) -> Object:
        """Another client makes or replaces an object."""
        before = self.kept.get(path)
        metadata = it["metadata"] | {"uid": before["metadata"]["uid"] if before else f"uid-{self._version + 1}"}
        self._version += 1
        self.kept[path] = it = copy.deepcopy({**it, "metadata": metadata | {"resourceVersion": str(self._version)}})
        self._tell("MODIFIED" if before else "ADDED", path, it)
        return it

    def wipe(self) -> None:
        """A kubelet that starts deletes all slices of its node."""
        for name in list(self.slices):
            self.remove(f"resourceslices/{name}")

    def remove(self, path: str) -> None:
        """Another client deletes an object."""
        it = self.kept.pop(path)
        self._version += 1
        self._tell("DELETED", path, {**it, "metadata": it["metadata"] | {"resourceVersion": str(self._version)}})

    def forget(self) -> None:
        """What happened until now cannot be watched any more (etcd's compaction)."""
        self.forgotten = self._version
        self._told.clear()
        self._wake()

    def _tell(self, kind: str, path: str, it: Object) -> None:
        self._told.append((self._version, kind, path, copy.deepcopy(it)))
        for listener in list(self._listeners):
            listener()
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    # --- requests ---

    def do(self, method: str, path: str, body: Object | None) -> Object:
        """The answer to a request.

        Raises:
            RefusalError: with its status.
        """
        where = urlsplit(path)
        if (status := self.refuses(method, where.path)) is not None:
            raise RefusalError(status, f"{method} is refused")
        if where.path.startswith("/api/v1/nodes/"):
            if where.path.rpartition("/")[2] != self.node["metadata"]["name"]:
                raise RefusalError(404, "no such node")
            return self.node
        below = where.path.removeprefix(f"{GROUP}/")
        if method == "GET" and below not in self.kept:
            return self._list(below, parse_qs(where.query))
        if method != "POST" and below not in self.kept:
            raise RefusalError(404, f"{below} not found")
        match method:
            case "GET":
                return self.kept[below]
            case "DELETE":
                self.remove(below)
                self.writes.append((method, below))
                return {"status": "Success"}
        assert body is not None
        below = f"{below}/{body['metadata']['name']}" if method == "POST" else below
        if method == "POST" and below in self.kept:
            raise RefusalError(409, f"{below} already exists")
        if (
            method == "PUT"
            and body["metadata"].get("resourceVersion") != self.kept[below]["metadata"]["resourceVersion"]
        ):
            raise RefusalError(409, "the object has been modified")
        check(body["spec"])
        body = copy.deepcopy(body)
        for device in body["spec"].get("devices", ()):
            if not self.knows_taints:
                device.pop("taints", None)
        self.writes.append((method, below))
        return self.put(below, body)

    def _list(self, below: str, query: Mapping[str, list[str]]) -> Object:
        if not below.endswith(("resourceslices", "resourceclaims", "deviceclasses")):
            raise RefusalError(404, f"{below} not found")
        found = [it for path, it in sorted(self.kept.items()) if path.rpartition("/")[0] == below and fits(it, query)]
        start, most = int(query.get("continue", ["0"])[0]), int(query.get("limit", ["500"])[0])
        more = {"continue": str(start + most)} if len(found) > start + most else {}
        return {"metadata": {"resourceVersion": str(self._version), **more}, "items": found[start : start + most]}

    async def watch(self, path: str, told: Callable[[Object], None]) -> None:
        """Hand on what happens behind a version, for ever.

        Raises:
            RefusalError: that version is forgotten.
        """
        where = urlsplit(path)
        query, below = parse_qs(where.query), where.path.removeprefix(f"{GROUP}/")
        at = int(query["resourceVersion"][0])
        while True:
            if at < self.forgotten:
                told(
                    {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}
                )
                return
            for version, kind, which, it in list(self._told):
                if version > at and which.rpartition("/")[0] == below and fits(it, query):
                    told({"type": kind, "object": it})
            at = self._version
            await self._news.wait()


def fits(it: Object, query: Mapping[str, list[str]]) -> bool:
    """Whether an object is what the field selector of a query asks for."""
    wanted = dict(pair.split("=") for pair in query.get("fieldSelector", [""])[0].split(",") if pair)
    told = {"spec.nodeName": it["spec"].get("nodeName"), "spec.driver": it["spec"].get("driver")}
    return all(told[name] == value for name, value in wanted.items())


def check(spec: Object) -> None:
    """The limits that the real one was tried for (DRA contract: D6), and those of counters (validation.go of 1.36).

    Raises:
        RefusalError: one is passed.
    """
    if ("devices" in spec) is ("sharedCounters" in spec):
        raise RefusalError(422, "only one of `sharedCounters` or `devices` is allowed")
    if not 0 <= len(spec.get("sharedCounters", ())) <= 8:
        raise RefusalError(422, "too many counter sets")
    devices = spec.get("devices", ())
    is_special = any("taints" in it or "consumesCounters" in it for it in devices)
    if len(devices) > (64 if is_special else 128) or spec["pool"]["resourceSliceCount"] < 1:
        raise RefusalError(422, "too many devices")
    if len({it["name"] for it in devices}) != len(devices):
        raise RefusalError(422, "a device's name is there twice")
    for it in devices:
        if len(it["attributes"]) + len(it.get("capacity", {})) > 32:
            raise RefusalError(422, f"{it['name']}: too many attributes")
        for name, value in it["attributes"].items():
            _, _, plain = name.rpartition("/")
            if not plain.isidentifier() or len(plain) > 32 or len(value) != 1:
                raise RefusalError(422, f"{it['name']}: {name}")
            if "string" in value and len(value["string"].encode()) > 64:
                raise RefusalError(422, f"{it['name']}: {name} is too long")
            if "version" in value and not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", value["version"]):
                raise RefusalError(422, f"{it['name']}: {name} is no version")
        if len(it.get("consumesCounters", ())) > 2:
            raise RefusalError(422, f"{it['name']}: too many counter sets")
        if any("requestPolicy" in one for one in it.get("capacity", {}).values()) and not it.get(
            "allowMultipleAllocations"
        ):
            raise RefusalError(422, "requestPolicy: allowMultipleAllocations must be true")


# --- HTTP, on a port of this machine ---

TOKEN: Final = "t0ken"  # noqa: S105  # nothing is behind it


class Request(Struct, frozen=True):
    """What is asked."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Object | None


class ApiServer:
    """One on localhost; while it is stopped, no process listens at its port."""

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
