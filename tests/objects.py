"""The objects of an API server, asked by calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from agent.kubernetes.api import ApiError
from agent.simulation.api_server import Objects, RefusalError


class CalledObjects:
    """The same as `agent.kubernetes.api.Api`, without a network."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.is_away = False

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content: str = "application/json"
    ) -> bytes:
        await asyncio.sleep(0)
        if self.is_away:
            raise ApiError("nobody answers")
        try:
            return json.dumps(self.objects.do(method, path, dict(body) if body else None)).encode()
        except RefusalError as error:
            raise ApiError(error.message, error.status) from error

    async def close(self) -> None:
        pass

    async def watch(self, path: str, accept: str, told: Callable[[bytes], None]) -> None:
        if self.is_away:
            raise ApiError("nobody answers")
        await self.objects.watch(path, lambda it: told(json.dumps(it).encode()))
