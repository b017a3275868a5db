"""The admin service: calls on its socket become questions to the daemon's `Control`, for root alone.

The socket's mode keeps others out; who connects is asked for all the same, since a mounted or passed-on socket has
no mode. A large status takes some 10 us for each device to be put into bytes, which a thread does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from agent.console import requests
from agent.console.control import Control, NoSuchDeviceError, RefusedError
from agent.console.messages import encode
from agent.console.requests import SERVICE, Request
from agent.kubelet.lock import exclusive
from agent.kubelet.transport.server import SocketServer, refusal
from agent.kubelet.wire import Encoded
from agent.runtime.supervision.problems import Problems
from agent.runtime.workers import Workers

_LOOK_AGAIN: Final = 2.0  # seconds between two looks whether the socket is still there
_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid (socket(7), SO_PEERCRED)

log = structlog.get_logger()

_Request = TypeVar("_Request")


class AdminService:
    """The service's methods."""

    def __init__(self, control: Control, allowed: frozenset[int] | None = None) -> None:
        """Prepare; `allowed` are the user IDs that may call: root's, and the one that the daemon runs as."""
        self._control = control
        self._allowed = frozenset({0, os.geteuid()}) if allowed is None else allowed
        self._workers = Workers("admin")
        self._refused: set[int] = set()

    def __mapping__(self) -> dict[str, Handler]:
        """The handlers as grpclib wants them."""
        unary: Mapping[str, tuple[Callable[[Any], Awaitable[Encoded]], type[Request]]] = {
            "Status": (self._status, requests.StatusRequest),
            "Explain": (self._explain, requests.ExplainRequest),
            "History": (self._history, requests.HistoryRequest),
            "Drain": (self._drain, requests.DrainRequest),
            "Undrain": (self._undrain, requests.UndrainRequest),
            "Reload": (self._reload, requests.ReloadRequest),
            "Handover": (self._hand_over, requests.HandoverRequest),
        }
        handlers = {
            SERVICE + name: Handler(self._answering(answer), Cardinality.UNARY_UNARY, request, Encoded)
            for name, (answer, request) in unary.items()
        }
        watch = Handler(self._watch, Cardinality.UNARY_STREAM, requests.WatchRequest, Encoded)
        return {**handlers, SERVICE + "Watch": watch}

    def _answering(self, answer: Callable[[Any], Awaitable[Encoded]]) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
        async def handle(stream: Stream[Any, Any]) -> None:
            request = await self._receive(stream)
            try:
                reply = await answer(request)
            except NoSuchDeviceError as error:
                raise refusal(Status.NOT_FOUND, str(error)) from error
            except RefusedError as error:
                raise refusal(Status.FAILED_PRECONDITION, str(error)) from error
            await stream.send_message(reply)

        return handle

    async def _receive(self, stream: Stream[_Request, Any]) -> _Request:
        self._check(stream)
        try:
            request = await stream.recv_message()
        except Exception as error:
            raise refusal(Status.INVALID_ARGUMENT, f"malformed request: {error}") from error
        if request is None:
            raise GRPCError(Status.INVALID_ARGUMENT, "the request has no message")
        return request

    def _check(self, stream: Stream[Any, Any]) -> None:
        """Refuse whoever may not call.

        Raises:
            GRPCError: PERMISSION_DENIED.
        """
        sock = stream.peer._transport.get_extra_info("socket")
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in self._allowed:
            if uid not in self._refused:
                self._refused.add(uid)
                log.warning("admin-call-refused", pid=pid, uid=uid, then="not telling again of this user")
            raise GRPCError(Status.PERMISSION_DENIED, f"user {uid} may not ask this of Fairlead; root may")

    async def _status(self, _request: requests.StatusRequest) -> Encoded:
        status = await self._control.status()
        return await self._workers.start(lambda: Encoded(encode(status)))

    async def _watch(self, stream: Stream[requests.WatchRequest, Any]) -> None:
        request = await self._receive(stream)
        async with aclosing(self._control.watch(request.last, follow=request.follow)) as events:
            async for event in events:
                await stream.send_message(Encoded(encode(event)))

    async def _explain(self, request: requests.ExplainRequest) -> Encoded:
        return Encoded(encode(self._control.explain(request.device)))

    async def _history(self, request: requests.HistoryRequest) -> Encoded:
        return Encoded(encode(self._control.history(request.device)))

    async def _drain(self, request: requests.DrainRequest) -> Encoded:
        return Encoded(encode(await self._control.drain(request.device, request.reason, request.until)))

    async def _undrain(self, request: requests.UndrainRequest) -> Encoded:
        return Encoded(encode(await self._control.undrain(request.device)))

    async def _reload(self, _request: requests.ReloadRequest) -> Encoded:
        return Encoded(encode(await self._control.reload()))

    async def _hand_over(self, _request: requests.HandoverRequest) -> Encoded:
        return Encoded(encode(await self._control.hand_over()))


async def serve(control: Control, path: Path, problems: Problems | None = None) -> None:
    """Serve on this socket for ever; while another agent has it, wait until that one is gone: one of the `problems`.

    A socket that somebody removes, with all of /run perhaps, is made again.

    Raises:
        OSError: no socket can be made there.
    """
    taken = (problems or Problems()).trouble(
        "admin socket",
        "commands reach another agent",
        "admin-socket-taken",
        file=str(path),
        then="waiting until it is gone",
    )

    def wait(pid: str) -> None:
        taken.report_once(f"process {pid} has {path}")

    while True:
        _make_directory(path)
        async with exclusive(path.with_name(f"{path.name}.lock"), wait), served(control, path) as it:
            taken.healed()
            while it.is_reachable():  # noqa: ASYNC110  # the file system sets no event of ours
                await asyncio.sleep(_LOOK_AGAIN)


@asynccontextmanager
async def served(control: Control, path: Path) -> AsyncIterator[SocketServer]:
    """Serve on this socket while in this context.

    Raises:
        OSError: no socket can be made there.
    """
    _make_directory(path)
    server = SocketServer([AdminService(control)], path)
    await server.open()
    try:
        yield server
    finally:
        await server.shut_down(patience=0.2)


def _make_directory(path: Path) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
