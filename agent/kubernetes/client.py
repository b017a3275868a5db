"""Sends requests to Kubernetes' API server, each with a deadline, on as few connections as they need.

HTTP/1.1 is spoken on them (h11), one request at a time on each. A request that finds all at work opens another, up to `MOST`;
one that has nothing to do is closed after a while. h11 is what uvicorn has, too: a client of its own (httpx) takes 5 ms more for
each of 64 requests at once, and 7 MB.

A token or certificate that is exchanged on disk is taken up within a minute. Proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import anyio
import h11
import msgspec
from msgspec.structs import replace

from agent.kubernetes.api import WATCH, ApiError, read
from agent.kubernetes.identity import Identity
from agent.runtime import pacing
from agent.runtime.errors import FairleadError, brief, words
from agent.runtime.problems import Trouble
from agent.runtime.workers import NoWorkerError, OneAtATime, Workers

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

DEADLINE: Final = 10.0
"""Seconds that a request may take, and reading the files that say who we are before it."""

_SILENCE: Final = WATCH + 30.0  # seconds without a byte after which a watch is given up: the server has gone
_FRESH: Final = 60.0  # seconds for which files are not read again (client-go's for tokens: 1 minute)
_MOST_BYTES: Final = 8 << 20  # of an answer: five times what etcd stores of an object

_TOO_LONG: Final = f"the API server answers with more than {_MOST_BYTES} bytes"


# --- connections ---


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
        """Whether it can carry a request, as far as is known."""
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
        self._name, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        # asyncio's own threads for this would have to end before the process can: a resolver may hang
        self._resolver = OneAtATime("the API server's name")
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
            lasts: it is a watch, and takes no turn.

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
        look_up = partial(socket.getaddrinfo, self._name, self._port, type=socket.SOCK_STREAM)
        try:
            addresses = [str(at[0]) for *_, at in await self._resolver.run(look_up)]
        except NoWorkerError as error:
            raise ConnectionError(str(error)) from error
        finally:
            self._resolver.close()
        loop, name = asyncio.get_running_loop(), self._name if self._tls else None
        failed: OSError = ConnectionError(f"{self._name} has no address")
        for address in addresses:
            try:
                _, made = await loop.create_connection(
                    Connection, address, self._port, ssl=self._tls, server_hostname=name
                )
            except OSError as error:
                failed = error
            else:
                return made
        raise failed

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


# --- requests ---


class _Object(msgspec.Struct):
    """Whatever an API server answers, unread."""


class _Status(msgspec.Struct):
    """A refusal (meta/v1 Status)."""

    message: str = ""


_Who = tuple[Identity, Connections]
"""Who we are, and the connections to where."""


class ApiClient:
    """An API server, for as many requests at a time as are asked."""

    def __init__(
        self,
        read: Callable[[], Identity],
        workers: Workers,
        away: Trouble,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` says who we are, and blocks; `away` is told whether the API server answers."""
        self._read, self._workers, self._away, self._clock = read, workers, away, clock
        self._who: _Who | None = None
        self._read_at = 0.0
        self._reading: asyncio.Future[_Who] | None = None

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content: str = "application/json"
    ) -> bytes:
        """The answer to a request, as `Api` says."""
        data = msgspec.json.encode(body) if body is not None else None
        with self._in_words():
            async with pacing.running_timeout(DEADLINE):
                who = await self._log_in()
                more = {"Content-Type": content} if data is not None else {}
                request = _request(who, method, path, more, data)
                async with who[1].ask(request, data or b"") as (head, answer):
                    await self._check(head, answer)
                    said = await _content(head, answer)
                read(said, _Object, head.status_code)
                return said

    async def watch(self, path: str, accept: str, told: Callable[[bytes], None]) -> None:
        """Hand on each line of a watch, until it ends or is silent for too long, as `Api` says."""
        with self._in_words():
            async with AsyncExitStack() as stack:
                async with pacing.running_timeout(DEADLINE):
                    who = await self._log_in()
                    request = _request(who, "GET", path, {"Accept": accept})
                    head, answer = await stack.enter_async_context(who[1].ask(request, lasts=True))
                    await self._check(head, answer)
                await _hand_on(answer, told)

    async def close(self) -> None:
        """End the connections that have no request."""
        if self._who is not None:
            self._who[1].close()

    async def _log_in(self) -> _Who:
        """Renew the credentials if that is due; once, for all that wait.

        Raises:
            ApiError: that cannot be read.
        """
        if self._who is None or self._clock() - self._read_at >= _FRESH:
            try:
                if self._reading is None:
                    self._reading = self._workers.start(partial(self._read_all, self._who))
                    self._reading.add_done_callback(self._log_in_as)
                return await asyncio.shield(self._reading)
            except (FairleadError, NoWorkerError) as error:
                self._away.report_once(str(error))
                raise ApiError(str(error)) from error
        return self._who

    def _read_all(self, before: _Who | None) -> _Who:
        identity = self._read()
        if before is not None and replace(before[0], token=identity.token) == identity:
            return identity, before[1]  # a token goes with each request
        try:
            return identity, Connections(identity.server, identity.tls)
        except ValueError as error:
            raise FairleadError(f"{brief(identity.server)!r} is no URL of an API server: {words(error)}") from error

    def _log_in_as(self, reading: asyncio.Future[_Who]) -> None:
        self._reading = None
        if reading.cancelled() or reading.exception() is not None:
            return
        before, self._who, self._read_at = self._who, reading.result(), self._clock()
        if before is not None and before[1] is not self._who[1]:
            before[1].close()

    async def _check(self, head: h11.Response, answer: Connection) -> None:
        """Check an answer that has begun.

        Raises:
            ApiError: it is a refusal.
            OSError: it breaks off.
        """
        self._away.healed()
        if HTTPStatus.OK <= head.status_code < HTTPStatus.MULTIPLE_CHOICES:
            return
        if head.status_code == HTTPStatus.UNAUTHORIZED:
            self._read_at = -_FRESH  # the token may have been exchanged
        content, why = await _content(head, answer), ""
        with suppress(ApiError):  # a proxy's
            why = read(content, _Status).message
        what = brief(why or head.reason.decode(errors="replace"))
        raise ApiError(f"the API server refuses it ({head.status_code}): {what}", head.status_code)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn a missing answer into an ApiError with a sentence."""
        try:
            yield
        except TimeoutError:
            why = f"it does not answer within {DEADLINE:g} s"
        except OSError as error:
            why = words(error) if str(error) else "the connection broke off"
        else:
            return
        server = self._who[0].server if self._who else "the API server"
        self._away.report_once(f"{server}: {why}")
        raise ApiError(f"{server}: {why}")


def _request(who: _Who, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None) -> h11.Request:
    """A request, with what all have.

    Raises:
        ApiError: something is in it that may not be.
    """
    identity, connections = who
    known = {"User-Agent": "fairlead", "Accept": "application/json"}
    token = {"Authorization": f"Bearer {identity.token}"} if identity.token else {}
    try:
        return connections.request(method, path, {**known, **token, **headers}, body)
    except ValueError:  # its words have the token
        raise ApiError(
            f"{brief(identity.server)}: the server's name or the token has a character that no request may have"
        ) from None


async def _hand_on(answer: Connection, told: Callable[[bytes], None]) -> None:
    """Hand on each line, and what follows the last: all that a proxy's page may have.

    Raises:
        ApiError: one is too long.
    """
    rest = b""
    while part := await _next(answer):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            told(line)
        if len(rest) > _MOST_BYTES:
            raise ApiError(_TOO_LONG, HTTPStatus.OK)
    if rest and part is not None:
        told(rest)


async def _next(answer: Connection) -> bytes | None:
    """The next part of a watch, empty at its end; None where a proxy or a restart ends it, or nothing comes for too long."""
    with anyio.move_on_after(_SILENCE), suppress(OSError):
        return await answer.part()
    return None


async def _content(head: h11.Response, answer: Connection) -> bytes:
    """All of it.

    Raises:
        ApiError: it is too long.
        OSError: it breaks off.
    """
    data = bytearray()
    while part := await answer.part():
        data += part
        if len(data) > _MOST_BYTES:
            raise ApiError(_TOO_LONG, head.status_code)
    return bytes(data)
