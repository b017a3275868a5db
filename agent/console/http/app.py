"""Answers requests, one function for each path. Only GET and HEAD: nothing here changes anything."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from email.utils import formatdate
from typing import Any, Final, Generic, TypeVar

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from agent.console.control import Control
from agent.console.http import metrics, page
from agent.console.http.page import EVENTS, Picture
from agent.console.service import Health, verdict
from agent.console.views import Event, Status
from agent.runtime.counts import Counts
from agent.runtime.errors import shown
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Problems
from agent.runtime.workers import in_slices

_HEADERS: Final = (
    (b"connection", b"close"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_POLICY: Final = (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'")

_OVER: Final = 300.0  # seconds without a failure after which it is over: a scrape comes each minute, as a rule


class Face:
    """The application (ASGI)."""

    def __init__(self, control: Control, health: Health, counts: Counts, problems: Problems | None = None) -> None:
        """Has to be made on the event loop that serves it; `problems` is told of answers that fail."""
        self._control = control
        self._health = health
        self._counts = counts
        self._status = SharedAnswer(self._look)
        self.picture = Picture(self._status.get, self._recall, control.histories)
        self.viewers = Viewers(control, self.picture, page.ASSETS)
        self._page = SharedAnswer(self._draw_page)
        self._metrics = SharedAnswer(self._write_metrics)
        self._json = SharedAnswer(self._write_json)
        self._failing = (problems or Problems()).trouble(
            "http",
            "an answer over HTTP fails by an error of Fairlead's",
            "http-failed",
            level="error",
            fades=_OVER,
            path="",
        )
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
            self._failing.report_once(f"{scope['path']}: {shown(error)}", error, path=scope["path"])
            raise  # uvicorn answers 500, or cuts the answer off

    # --- the answers ---

    async def page(self, _request: Request) -> Response:
        """Everything at a glance."""
        policy = {"content-security-policy": page.POLICY}
        return Whole(await self._page.get(), headers=policy, media_type="text/html")

    async def events(self, request: Request) -> Response:
        """What changes on the page, as it changes."""
        if self.viewers.number >= MOST_VIEWERS:
            return PlainTextResponse("too many pages are open\n", 503, {"retry-after": "30"})
        seen = request.headers.get("last-event-id") or request.query_params.get("seen", "")
        return EventStream(lambda: self.viewers.messages(seen))

    async def metrics(self, _request: Request) -> Response:
        """For Prometheus."""
        return Whole(await self._metrics.get(), headers={"content-type": metrics.CONTENT_TYPE})

    async def status_json(self, _request: Request) -> Response:
        """For programs."""
        return Whole(await self._json.get(), media_type="application/json")

    async def healthz(self, _request: Request) -> Response:
        """Whether the daemon itself is well. That it answers is half of it."""
        return await self._probe("live")

    async def readyz(self, _request: Request) -> Response:
        """Whether the node is served, by this daemon or, while it stands by, by another."""
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
        return await _as_bytes(page.document(self.picture))

    async def _write_metrics(self) -> bytes:
        pieces = metrics.exposition(await self._status.get(), self._counts)
        return await _as_bytes(pieces)

    async def _write_json(self) -> bytes:
        return as_json(await self._status.get())


def _with_ours(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    own = [] if any(name == _POLICY[0] for name, _ in headers) else [_POLICY]
    return [*headers, *own, *_HEADERS, (b"date", formatdate(time.time(), usegmt=True).encode())]


# --- the live page's stream: it is drawn while viewers are connected, and each is sent what it does not have yet ---

MOST_VIEWERS: Final = 32
"""Pages that may be open at a time; half of all connections, so that scrapes and probes find one."""

PING: Final = 5.0
"""Seconds after which a viewer hears from us, if nothing happens; the page takes twice that for a lost connection."""

_POLL: Final = 2.0  # seconds between two looks without an event: not all that is shown has one
_COALESCE: Final = 0.2  # seconds between two looks in a burst of events
_MESSAGE_CHARACTERS: Final = 32 * 1024  # of parts, in one message


class Viewers:
    """The browsers that have the page open."""

    def __init__(self, control: Control, picture: Picture, assets: str) -> None:
        """`assets` names the page's script and style: a page that has others loads itself again."""
        self.number = 0
        self._control = control
        self._picture = picture
        self._assets = assets
        self._watched, self._happened = Doorbell(), Doorbell()
        self._drawn = asyncio.Event()
        self._told = 0  # the version that viewers were woken for last

    async def run(self) -> None:
        """Draw the page while a browser shows it, for ever."""
        while True:
            await self._watched.until(lambda: self.number > 0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen)
                while self.number:
                    await self._look()
                tasks.cancel_scope.cancel()

    async def _listen(self) -> None:
        """Wake the drawing at each event."""
        async with aclosing(self._control.watch(0, follow=True)) as events:
            async for _ in events:
                self._happened.set()

    async def _look(self) -> None:
        await self._picture.refresh()
        if self._picture.version != self._told:  # a browser that loads the page has it drawn, too
            self._told = self._picture.version
            self._drawn.set()
            self._drawn = asyncio.Event()
        await anyio.sleep(_COALESCE)
        await self._happened.rung(_POLL)

    async def messages(self, seen: str) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one viewer: first what it lacks, then what changes; `seen` is the last ID it had."""
        run, _, number = seen.partition("-")
        has = int(number) if run == self._picture.run and number.isdecimal() else 0
        self.number += 1
        self._watched.set()
        try:
            yield _message("hello", self._assets, "retry: 1000\n")
            while True:
                drawn, version = self._drawn, self._picture.version
                for message in self._news(has):
                    yield message
                has = version
                with anyio.move_on_after(PING):
                    await drawn.wait()
                    continue
                yield _message("ping", time.time())
        finally:
            self.number -= 1

    def _news(self, has: int) -> Iterator[bytes]:
        """What has changed since that version, in messages of limited size; only the last one has the new version."""
        picture = self._picture
        version, parts, size = picture.version, dict[str, str](), 0
        for name, html in picture.since(has).items():
            parts[name] = html
            size += len(html)
            if size >= _MESSAGE_CHARACTERS:
                yield _message("parts", parts)
                parts, size = {}, 0
        if version > has:
            yield _message("parts", parts, f"id: {picture.run}-{version}\n")


def _message(kind: str, data: object, more: str = "") -> bytes:
    return b"%sevent: %s\ndata: %s\n\n" % (more.encode(), kind.encode(), as_json(data))


async def _as_bytes(pieces: Iterable[str]) -> bytes:
    """A text in UTF-8, also with a file name in it that is no text; each piece is encoded by itself, as all take 50 ms."""
    return b"".join(await in_slices(piece.encode(errors="replace") for piece in pieces))


# --- an expensive answer is made once for all clients that ask within a moment ---

_T = TypeVar("_T")

_SHARE: Final = 10  # it is kept for ten times the CPU time it took: making it again and again costs a tenth of a core


class SharedAnswer(Generic[_T]):
    """An answer that is made again once it is old."""

    def __init__(
        self,
        make: Callable[[], Awaitable[_T]],
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """`spent` tells seconds of CPU: time in which the process stood still does not count."""
        self._make = make
        self._clock = clock
        self._spent = spent
        self._making = asyncio.Lock()
        self._made: _T | None = None
        self._until = 0.0
        self._times = 0  # how often it was made

    async def get(self) -> _T:
        """The answer, made now or a moment ago; clients that ask while it is made share it."""
        asked = self._times
        async with self._making:
            if self._made is None or (self._times == asked and self._clock() >= self._until):
                began = self._spent()
                self._made = await self._make()
                self._until = self._clock() + _SHARE * (self._spent() - began)
                self._times += 1
            return self._made


# --- answers: JSON, whole bodies in parts that a slow client cannot pile up, and the stream of the live page ---

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
