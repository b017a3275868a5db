"""An API server that is asked by calls, not over a network."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from agent.kubernetes.api import ApiError


class FakeApi:
    """Answers as it is told, and notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, Any]] = []
        """Method, path and body of what was done."""
        self.refuses: Callable[[str, str], int | None] = lambda method, path: None
        """The status with which a method of a path is refused; 0: there is no answer."""
        self.node: dict[str, Any] = {"status": {"conditions": []}}

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content: str = "application/json"
    ) -> bytes:
        if (status := self.refuses(method, path)) is not None:
            raise ApiError(f"refused with {status}", status)
        self.calls.append((method, path, body))
        return json.dumps(self.node).encode()

    async def watch(self, path: str, accept: str, told: Callable[[bytes], None]) -> None:
        raise NotImplementedError

    def of(self, method: str) -> list[Any]:
        """The bodies that it was sent by a method."""
        return [body for called, _, body in self.calls if called == method]
