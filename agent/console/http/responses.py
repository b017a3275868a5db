"""Answers: JSON, whole bodies in parts that a slow client cannot pile up, and the stream of the live page."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_PART_BYTES: Final = 32 * 1024


def as_json(value: Any) -> bytes:
    """A value as JSON, also with a file name in it that is no text. A status of 10,000 devices takes 3 ms, or then 30."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode()


class Whole(Response):
    """A body of any size, which several requests may share."""

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Answer, waiting after each part until it has been read."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = bytes(self.body)
        for offset in range(0, len(body) or 1, _PART_BYTES):
            more = offset + _PART_BYTES < len(body)
            await send({"type": "http.response.body", "body": body[offset : offset + _PART_BYTES], "more_body": more})


class EventStream(Response):
    """Server-sent events, until the client goes."""

    media_type = "text/event-stream"

    def __init__(self, messages: Callable[[], AsyncGenerator[bytes, None]]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send what there is, waiting after each message until it has been read."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] != "HEAD":
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(functools.partial(_until_gone, receive, tasks.cancel_scope))
                await self._send_all(send)
                tasks.cancel_scope.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        messages = self._messages()
        async with aclosing(messages):
            async for message in messages:
                await send({"type": "http.response.body", "body": message, "more_body": True})


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
