"""Sends requests to Kubernetes' API server, each with a deadline, on as few connections as they need.

A token or certificate that is exchanged on disk is taken up within a minute. Proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import anyio
import h11
import msgspec
from msgspec.structs import replace

from agent.kubernetes.api import WATCH, ApiError, read
from agent.kubernetes.connections import Connection, Connections
from agent.kubernetes.identity import Identity
from agent.runtime import pacing
from agent.runtime.errors import FairleadError, brief, words
from agent.runtime.problems import Trouble
from agent.runtime.workers import NoWorkerError, Workers

DEADLINE: Final = 10.0
"""Seconds that a request may take, and reading the files that say who we are before it."""

_SILENCE: Final = WATCH + 30.0  # seconds without a byte after which a watch is given up: the server has gone
_FRESH: Final = 60.0  # seconds for which files are not read again (client-go's for tokens: 1 minute)
_MOST_BYTES: Final = 8 << 20  # of an answer: five times what etcd stores of an object

_TOO_LONG: Final = f"the API server answers with more than {_MOST_BYTES} bytes"


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
                    said = await _content(answer)
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
        """Renew the credentials if that is due; once, whoever waits for it.

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
        content, why = await _content(answer), ""
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
            raise ApiError(_TOO_LONG)
    if rest and part is not None:
        told(rest)


async def _next(answer: Connection) -> bytes | None:
    """The next part of a watch, empty at its end; None where a proxy or a restart ends it, or nothing comes for too long."""
    with anyio.move_on_after(_SILENCE), suppress(OSError):
        return await answer.part()
    return None


async def _content(answer: Connection) -> bytes:
    """All of it.

    Raises:
        ApiError: it is too long.
        OSError: it breaks off.
    """
    data = bytearray()
    while part := await answer.part():
        data += part
        if len(data) > _MOST_BYTES:
            raise ApiError(_TOO_LONG)
    return bytes(data)
