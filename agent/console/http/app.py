"""Answers requests, one function for each path. Only GET and HEAD: nothing here changes anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from email.utils import formatdate
from typing import Final

import structlog
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from agent.console.control import Control
from agent.console.http import prometheus_format, viewers
from agent.console.http.metrics import exposition as all_metrics
from agent.console.http.page import page
from agent.console.http.page.page_parts import EVENTS, Picture
from agent.console.http.responses import EventStream, Whole, as_json
from agent.console.http.shared_answers import SharedAnswer
from agent.console.http.viewers import Viewers
from agent.console.probe_service import Health, verdict
from agent.console.views import Event, Status
from agent.runtime.chunked_work import in_slices
from agent.runtime.counts import Counts

_HEADERS: Final = (
    (b"connection", b"close"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_POLICY: Final = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")

log = structlog.get_logger()


class Face:
    """The application (ASGI)."""

    def __init__(self, control: Control, health: Health, counts: Counts) -> None:
        """Has to be made on the event loop that serves it."""
        self._control = control
        self._health = health
        self._counts = counts
        self._status = SharedAnswer(self._look)
        self.picture = Picture(self._status.get, self._recall, control.histories)
        self.viewers = Viewers(control, self.picture, page.ASSETS)
        self._page = SharedAnswer(self._draw_page)
        self._metrics = SharedAnswer(self._write_metrics)
        self._json = SharedAnswer(self._write_json)
        self._complaint = ""
        paths: dict[str, Callable[..., object]] = {
            "/": self.page,
            "/events": self.events,
            "/metrics": self.metrics,
            "/status.json": self.status_json,
            "/healthz": self.healthz,
            "/readyz": self.readyz,
        }
        self._router = Router(
            [Route(path, answer, methods=["GET"]) for path, answer in paths.items()], redirect_slashes=False
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _with_ours(message["headers"])
            await send(message)

        try:
            await self._router(scope, receive, send_with_headers)
        except Exception as error:
            if repr(error) != self._complaint:
                self._complaint = repr(error)
                log.exception("http-failed", path=scope["path"])
            raise  # uvicorn answers 500, or cuts the answer off

    # --- the answers ---

    async def page(self, _request: Request) -> Response:
        """Everything at a glance."""
        policy = {"content-security-policy": page.POLICY}
        return Whole(await self._page.get(), headers=policy, media_type="text/html")

    async def events(self, request: Request) -> Response:
        """What changes on the page, as it changes."""
        if self.viewers.number >= viewers.MOST:
            return PlainTextResponse("too many pages are open\n", 503, {"retry-after": "30"})
        seen = request.headers.get("last-event-id") or request.query_params.get("seen", "")
        return EventStream(lambda: self.viewers.messages(seen))

    async def metrics(self, _request: Request) -> Response:
        """For Prometheus."""
        return Whole(await self._metrics.get(), headers={"content-type": prometheus_format.CONTENT_TYPE})

    async def status_json(self, _request: Request) -> Response:
        """For programs."""
        return Whole(await self._json.get(), media_type="application/json")

    async def healthz(self, _request: Request) -> Response:
        """Is the daemon itself well? That it answers is half of it."""
        return await self._probe("live")

    async def readyz(self, _request: Request) -> Response:
        """Is the node served, by this one or, while it stands by, by another?"""
        return await self._probe("ready")

    async def _probe(self, what: str) -> Response:
        is_well, sentences = await verdict(what, self._status.get, self._health)
        return PlainTextResponse(f"{sentences}\n", 200 if is_well else 503)

    # --- what they are made of ---

    async def _look(self) -> Status:
        return await self._control.status()

    async def _recall(self) -> Sequence[Event]:
        async with aclosing(self._control.watch(EVENTS, follow=False)) as events:
            return [event async for event in events]

    async def _draw_page(self) -> bytes:
        await self.picture.refresh()
        return "".join(await in_slices(page.document(self.picture))).encode(errors="replace")

    async def _write_metrics(self) -> bytes:
        pieces = all_metrics(await self._status.get(), self._counts)
        return "".join(await in_slices(pieces)).encode(errors="replace")

    async def _write_json(self) -> bytes:
        return as_json(await self._status.get())


def _with_ours(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    own = [] if any(name == _POLICY[0] for name, _ in headers) else [_POLICY]
    return [*headers, *own, *_HEADERS, (b"date", formatdate(time.time(), usegmt=True).encode())]
