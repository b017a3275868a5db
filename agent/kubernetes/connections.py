"""Keeps connections to one HTTP server, and speaks HTTP/1.1 on them (h11): one request at a time on each.

A request that finds all connections at work opens another, up to `MOST`; one that has nothing to do is closed after a while. h11 is
what uvicorn has, too: a client of its own (httpx) takes 5 ms more for each of 64 requests at once, and 7 MB.
"""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import h11

if TYPE_CHECKING:
    import ssl

MOST: Final = 4
"""Connections for requests that end; a watch has its own."""

IDLE: Final = 30.0
"""Seconds after which a connection without a request is closed; an API server does so after 90 (its `IdleTimeout`)."""

_MOST_HEAD: Final = 64 << 10  # bytes of an answer's head
_MOST_UNREAD: Final = 64 << 10  # bytes that come before those that came are used
_STEP: Final = (
    100  # parts of an answer that are read before others have a turn: each may have one byte, and takes 10 us
)


class BrokenError(OSError):
    """A connection that had answered before ended without a byte of the answer: the server closed it as idle."""


class Connection(asyncio.Protocol):
    """One connection: a request, its answer to the end, the next request."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEAD)
        self._transport: asyncio.Transport
        self._arrived: asyncio.Future[None] | None = None
        self._is_asked = self._is_answered = self._is_lost = False
        self._error: Exception | None = None
        self._steps = self._unread = 0
        self.idle_since = 0.0

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if not self._is_asked:  # an answer to nothing, as a proxy's 408: the next request must not get it
            self.cut()
            return
        self._is_answered = True
        self._http.receive_data(data)
        self._unread += len(data)
        if self._unread > _MOST_UNREAD:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._is_lost, self._error = True, exc
        self._http.receive_data(b"")
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    # --- a request ---

    async def ask(self, request: h11.Request, body: bytes) -> h11.Response:
        """Send a request; returns the head of its answer.

        Raises:
            OSError: the connection ends, or what answers speaks no HTTP.
        """
        was_used, self._is_answered, self._is_asked = self._is_answered, False, True
        try:
            head, end = self._http.send(request), h11.EndOfMessage()
            data = self._http.send(h11.Data(data=body)) if body else b""
            self._transport.write(b"".join((head or b"", data or b"", self._http.send(end) or b"")))
            while not isinstance(event := await self._next(), h11.Response):
                pass  # a 1xx
        except OSError as error:
            if was_used and not self._is_answered:
                raise BrokenError(*error.args) from error
            raise
        return event

    async def part(self) -> bytes:
        """The next part of the answer; empty at its end.

        Raises:
            OSError: as `ask`.
        """
        return bytes(event.data) if isinstance(event := await self._next(), h11.Data) else b""

    async def _next(self) -> object:
        self._steps += 1
        if not self._steps % _STEP:
            await asyncio.sleep(0)
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._arrived = asyncio.get_running_loop().create_future()
                self._resume()
                await self._arrived
        except h11.ProtocolError as error:
            if self._is_lost:
                raise self._error or ConnectionResetError("the connection broke off") from error
            raise ConnectionError(f"what answers speaks no HTTP: {error}") from error
        return event

    def _resume(self) -> None:
        """All that has come is used."""
        if self._unread > _MOST_UNREAD:
            self._transport.resume_reading()
        self._unread = 0

    def rest(self) -> bool:
        """Have it wait for the next request; False if there can be none."""
        http = self._http
        if self._is_lost or not (http.our_state is http.their_state is h11.DONE) or http.trailing_data[0]:
            return False
        http.start_next_cycle()
        self._is_asked = False
        self._resume()  # so that its end is noticed
        return True

    @property
    def is_open(self) -> bool:
        """Can it carry a request, as far as is known?"""
        return not (self._is_lost or self._transport.is_closing())

    def cut(self) -> None:
        """End it at once."""
        self._transport.abort()


class Connections:
    """Those to one server."""

    def __init__(self, url: str, tls: Callable[[], ssl.SSLContext]) -> None:
        """Prepare.

        Args:
            url: of the server, with what comes before each path.
            tls: makes the context for https, and blocks.

        Raises:
            ValueError: that is no URL of a server.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it must begin with https:// and a name")
        parts.hostname.encode("idna")  # as it is looked up
        self._tls = tls() if parts.scheme == "https" else None
        self._address = parts.hostname, parts.port or (443 if self._tls else 80)
        self._host, self._path = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
        self._idle: list[Connection] = []
        self._turns = asyncio.Semaphore(MOST)
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    def request(self, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> h11.Request:
        """A request for `ask`.

        Raises:
            ValueError: a header has a character that none may have.
        """
        more = {"Content-Length": str(len(body))} if body is not None else {}
        try:
            return h11.Request(
                method=method, target=self._path + path, headers=[("Host", self._host), *headers.items(), *more.items()]
            )
        except h11.LocalProtocolError as error:
            raise ValueError(str(error)) from error

    @asynccontextmanager
    async def ask(
        self, request: h11.Request, body: bytes = b"", *, lasts: bool = False
    ) -> AsyncIterator[tuple[h11.Response, Connection]]:
        """Send a request when a connection is free; gives the head of its answer, and what has the rest.

        A connection that ends before all of it is read is not used again. A GET is sent once more where the server has closed
        the connection as idle at that moment.

        Args:
            request: as `request` makes one.
            body: of it.
            lasts: it is a watch: it takes nobody's turn.

        Raises:
            OSError: no connection can be made, or it ends, or what answers speaks no HTTP.
        """
        if not lasts:
            await self._turns.acquire()
        connection = None
        try:
            while True:
                connection = await self._connection()
                try:
                    response = await connection.ask(request, body)
                    break
                except BrokenError:
                    if request.method != b"GET":
                        raise
                    connection.cut()
            yield response, connection
        finally:
            if connection is not None:
                self._give_back(connection)
            if not lasts:
                self._turns.release()

    async def _connection(self) -> Connection:
        while self._idle:
            if (it := self._idle.pop()).is_open:
                return it
        host, port = self._address
        loop = asyncio.get_running_loop()
        name = host if self._tls else None
        _, made = await loop.create_connection(Connection, host, port, ssl=self._tls, server_hostname=name)
        return made

    def _give_back(self, it: Connection) -> None:
        if self._is_closed or not it.rest():
            it.cut()
            return
        loop = asyncio.get_running_loop()
        it.idle_since = loop.time()
        self._idle.append(it)
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE, self._close_idle)

    def _close_idle(self) -> None:
        """Close those that have had nothing to do for long; those used last are at the end."""
        loop, self._sweep = asyncio.get_running_loop(), None
        while self._idle and self._idle[0].idle_since + IDLE <= loop.time():
            self._idle.pop(0).cut()
        if self._idle:
            self._sweep = loop.call_at(self._idle[0].idle_since + IDLE, self._close_idle)

    def close(self) -> None:
        """Close those without a request now, the others when they have none."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        while self._idle:
            self._idle.pop().cut()
