"""An API server of Kubernetes, as far as Fairlead asks one: events, one Node, watches of it, and what dynamic allocation has."""

from __future__ import annotations

import asyncio
import copy
import ssl
from typing import Final

from agent.simulation import api_server
from agent.simulation.api_server import GROUP, TOKEN, Object, Request
from tests.wait import until

NODE: Final = "worker-1"
DRAIN: Final = "fairlead.dev/drain"
__all__ = ["NODE", "TOKEN", "ApiServer"]


class ApiServer(api_server.ApiServer):
    """One that also has events, and misbehaves as it is told."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(NODE, tls)
        self.events: dict[str, Object] = {}
        """By their names, as they are now."""
        self.node = self.objects.node
        self.requests: list[str] = []
        """Method and path of each."""
        self.hangs = False
        self.has_policies = True
        """Whether dry runs of what the agent may not write are refused."""
        self.refuses: dict[str, int] = {}
        """Method → the status it is refused with."""
        self.page = b""
        """What a proxy answers in its place, with 200, whatever is asked."""
        self._watches: set[asyncio.StreamWriter] = set()

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

    def _left(self, writer: asyncio.StreamWriter) -> None:
        super()._left(writer)
        self._watches.discard(writer)

    async def _respond(self, asked: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method, path = asked.method, asked.path
        self.requests.append(f"{method} {path}")
        if self.hangs:
            await reader.read()  # until the client has enough
        if self.page:
            self._say(writer, 200, self.page)
        elif self._knows(asked) and method in self.refuses:
            self._answer(writer, self.refuses[method], {"message": f"{NODE} is forbidden to {method}"})
        elif self._knows(asked) and path.endswith("?dryRun=All"):
            self._answer(writer, *((422, {"message": "denied request"}) if self.has_policies else (200, {})))
        elif not self._knows(asked) or path.startswith(GROUP):
            await super()._respond(asked, reader, writer)
        elif "watch=true" in path:
            self._begin(writer)
            self._watches.add(writer)
            if f"metadata.name%3D{NODE}&" in path:
                self._tell("ADDED", writer)
        else:
            self._answer(writer, *self._do(method, path, asked.body or {}))

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

    def _tell(self, kind: str, writer: asyncio.StreamWriter) -> None:
        self._chunk(writer, {"type": kind, "object": copy.deepcopy(self.node)})
