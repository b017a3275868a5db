"""Sends requests to Kubernetes' API server, one at a time, each with a deadline.

A token or certificate that is exchanged on disk is taken up within a minute. Proxies of the environment are not used. The
module imports httpx, which takes 0.1 s: import it in a thread, and only where the configuration asks for it.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Any, Final

import httpx
import msgspec

from agent.kubernetes.api import WATCH, ApiError, read
from agent.kubernetes.identity import Identity
from agent.runtime import running_time
from agent.runtime.errors import FairleadError, brief, words
from agent.runtime.supervision.problems import Trouble
from agent.runtime.workers import NoWorkerError, Workers

DEADLINE: Final = 10.0
"""Seconds that a request may take, and reading the files that say who we are before it."""

_SILENCE: Final = WATCH + 30.0  # seconds without a byte after which a watch is given up: the server has gone
_FRESH: Final = 60.0  # seconds for which files are not read again (client-go's for tokens: 1 minute)
_MOST_BYTES: Final = 8 << 20  # of an answer: five times what etcd stores of an object

_TOO_LONG: Final = f"the API server answers with more than {_MOST_BYTES} bytes"
_ONE: Final = httpx.Limits(max_connections=1)


class _Object(msgspec.Struct):
    """Whatever an API server answers, unread."""


class _Status(msgspec.Struct):
    """A refusal (meta/v1 Status)."""

    message: str = ""


class ApiClient:
    """One connection to the API server, for one request at a time."""

    def __init__(
        self,
        read: Callable[[], Identity],
        workers: Workers,
        away: Trouble,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` says who we are, and blocks; `away` is told whether the API server answers."""
        self._read, self._workers, self._away, self._clock = read, workers, away, clock
        self._identity: Identity | None = None
        self._read_at = 0.0
        self._http: httpx.AsyncClient

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content: str = "application/json"
    ) -> bytes:
        """The answer to a request, as `Api` says."""
        data = msgspec.json.encode(body) if body is not None else None
        with self._in_words():
            async with running_time.timeout(DEADLINE):
                server = await self._log_in()
                headers = {**self._headers(), "Content-Type": content}
                async with self._http.stream(method, server + path, content=data, headers=headers) as answer:
                    await self._check(answer)
                    said = await _content(answer)
                    read(said, _Object, answer.status_code)
                    return said

    async def watch(self, path: str, accept: str, told: Callable[[bytes], None]) -> None:
        """Hand on each line of a watch, until it ends or is silent for too long, as `Api` says."""
        with self._in_words():
            async with running_time.timeout(DEADLINE):
                server = await self._log_in()
                headers, timeout = {**self._headers(), "Accept": accept}, httpx.Timeout(None, read=_SILENCE)
                request = self._http.build_request("GET", server + path, headers=headers, timeout=timeout)
                answer = await self._http.send(request, stream=True)
            try:
                await self._check(answer)
                with suppress(httpx.TransportError):  # a proxy or a restart ends it: the caller watches again
                    await _hand_on(answer, told)
            finally:
                await answer.aclose()

    async def close(self) -> None:
        """End the connection."""
        if self._identity is not None:
            self._identity = None
            await self._http.aclose()

    async def _log_in(self) -> str:
        """Renew the credentials if that is due; returns the server's URL.

        Raises:
            ApiError: that cannot be read.
        """
        if self._identity is None or self._clock() - self._read_at >= _FRESH:
            try:
                identity, tls = await self._workers.start(self._read_all)
            except (FairleadError, NoWorkerError) as error:
                self._away.report_once(str(error))
                raise ApiError(str(error)) from error
            if identity != self._identity:
                await self.close()
                # `patience` keeps the deadline, which counts only time in which this process runs
                self._http = httpx.AsyncClient(verify=tls, trust_env=False, timeout=None, limits=_ONE)  # noqa: S113
            self._identity, self._read_at = identity, self._clock()
        return self._identity.server

    def _read_all(self) -> tuple[Identity, ssl.SSLContext]:
        identity = self._read()
        return identity, identity.tls()

    def _headers(self) -> dict[str, str]:
        token = self._identity.token if self._identity else ""
        return {"User-Agent": "fairlead", "Accept": "application/json"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )

    async def _check(self, answer: httpx.Response) -> None:
        """Check an answer that has begun.

        Raises:
            ApiError: it is a refusal.
        """
        self._away.healed()
        if answer.is_success:
            return
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            self._read_at = -_FRESH  # the token may have been exchanged
        content, why = await _content(answer), ""
        with suppress(ApiError):  # a proxy's
            why = read(content, _Status).message
        what = brief(why) or answer.reason_phrase
        raise ApiError(f"the API server refuses it ({answer.status_code}): {what}", answer.status_code)

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn a missing answer into an ApiError with a sentence."""
        try:
            yield
        except TimeoutError:
            why = f"it does not answer within {DEADLINE:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            why = words(error) if str(error) else "the connection broke off"
        else:
            return
        server = self._identity.server if self._identity else "the API server"
        self._away.report_once(f"{server}: {why}")
        raise ApiError(f"{server}: {why}")


async def _hand_on(answer: httpx.Response, told: Callable[[bytes], None]) -> None:
    """Hand on each line, and what follows the last: all that a proxy's page may have.

    Raises:
        ApiError: one is too long.
    """
    rest = b""
    async for part in answer.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            told(line)
        if len(rest) > _MOST_BYTES:
            raise ApiError(_TOO_LONG)
    if rest:
        told(rest)


async def _content(answer: httpx.Response) -> bytes:
    """All of it.

    Raises:
        ApiError: it is too long.
    """
    data = bytearray()
    async for part in answer.aiter_bytes():
        data += part
        if len(data) > _MOST_BYTES:
            raise ApiError(_TOO_LONG)
    return bytes(data)
