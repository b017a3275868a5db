"""Serves the daemon's two sockets, both for root alone: that of the commands, and that of the kubelet's probes.

What comes becomes a question to the daemon's `Control`. The sockets' mode keeps others out; who asks by the admin socket is
looked at all the same, since a mounted or passed-on socket has no mode.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import anyio
import structlog
from grpclib.const import Cardinality, Handler
from grpclib.const import Status as Code
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from agent.console.control import (
    SERVICE,
    Codec,
    Control,
    DeviceRequest,
    DrainRequest,
    EmptyRequest,
    NoSuchDeviceError,
    RefusedError,
    WatchRequest,
)
from agent.console.sockets import PROBES, WELL, probe_socket
from agent.console.views import Event, Status
from agent.kubelet.client import listens
from agent.kubelet.lock import exclusive, identity
from agent.kubelet.server import SocketServer, listen, refusal
from agent.runtime.problems import Problems

_LOOK_AGAIN: Final = 2.0  # seconds between two looks whether the socket is still there
_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid (socket(7), SO_PEERCRED)

log = structlog.get_logger()

_Request = TypeVar("_Request")


class AdminService:
    """The service's methods."""

    def __init__(self, control: Control, allowed: frozenset[int] | None = None) -> None:
        """`allowed` are the user IDs that may call: by default root's, and the one that the daemon runs as."""
        self._control = control
        self._allowed = frozenset({0, os.geteuid()}) if allowed is None else allowed
        self._refused: set[int] = set()

    def __mapping__(self) -> dict[str, Handler]:
        """The handlers as grpclib wants them."""
        control = self._control
        calls: Mapping[str, tuple[type[Any], Callable[[Any], Awaitable[Any]]]] = {
            "Status": (EmptyRequest, lambda _: control.status()),
            "Explain": (DeviceRequest, lambda it: control.explain(it.device)),
            "History": (DeviceRequest, lambda it: control.history(it.device)),
            "Histories": (EmptyRequest, lambda _: control.histories()),
            "Drain": (DrainRequest, lambda it: control.drain(it.device, it.reason, it.until)),
            "Undrain": (DeviceRequest, lambda it: control.undrain(it.device)),
            "Reload": (EmptyRequest, lambda _: control.reload()),
            "Handover": (EmptyRequest, lambda _: control.hand_over()),
        }
        handlers = {
            SERVICE + name: Handler(self._answering(call), Cardinality.UNARY_UNARY, request, object)
            for name, (request, call) in calls.items()
        }
        watch = Handler(self._watch, Cardinality.UNARY_STREAM, WatchRequest, Event)
        return {**handlers, SERVICE + "Watch": watch}

    def _answering(self, call: Callable[[Any], Awaitable[Any]]) -> Callable[[Stream[Any, Any]], Awaitable[None]]:
        async def handle(stream: Stream[Any, Any]) -> None:
            request = await self._receive(stream)
            try:
                view = await call(request)
            except NoSuchDeviceError as error:
                raise refusal(Code.NOT_FOUND, str(error)) from error
            except RefusedError as error:
                raise refusal(Code.FAILED_PRECONDITION, str(error)) from error
            await stream.send_message(view)

        return handle

    async def _receive(self, stream: Stream[_Request, Any]) -> _Request:
        self._check(stream)
        try:
            request = await stream.recv_message()
        except Exception as error:
            raise refusal(Code.INVALID_ARGUMENT, f"malformed request: {error}") from error
        if request is None:
            raise GRPCError(Code.INVALID_ARGUMENT, "the request has no message")
        return request

    def _check(self, stream: Stream[Any, Any]) -> None:
        """Refuse users who may not call.

        Raises:
            GRPCError: PERMISSION_DENIED.
        """
        sock = stream.peer._transport.get_extra_info("socket")
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in self._allowed:
            if uid not in self._refused:
                self._refused.add(uid)
                log.warning("admin-call-refused", pid=pid, uid=uid, then="not telling again of this user")
            raise GRPCError(Code.PERMISSION_DENIED, f"user {uid} may not ask this of Fairlead; root may")

    async def _watch(self, stream: Stream[WatchRequest, Any]) -> None:
        request = await self._receive(stream)
        async with aclosing(self._control.watch(request.last, follow=request.follow)) as events:
            async for event in events:
                await stream.send_message(event)


async def serve(control: Control, path: Path, problems: Problems | None = None) -> None:
    """Serve on this socket for ever; while another agent has it, wait until that one is gone: one of the `problems`.

    A socket that is removed, perhaps with all of /run, is made again.

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
    server = SocketServer([AdminService(control)], path, Codec())
    await server.open()
    try:
        yield server
    finally:
        await server.shut_down(patience=0.2)


def _make_directory(path: Path) -> None:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)


# --- the kubelet's probes: no other user can keep them waiting, or answer them ---


_ASKS_WITHIN: Final = 2.0  # seconds


class Health(Protocol):
    """Whether the daemon itself is well; of devices it says nothing."""

    def alive(self) -> str:
        """Empty while its loop turns and its watchdog is fed, else why not, in one sentence."""


async def verdict(what: str, look: Callable[[], Awaitable[Status]], health: Health) -> tuple[bool, str]:
    """Whether this probe succeeds, and the sentences that say it."""
    if what == "live":
        ailment = health.alive()
        return not ailment, ailment or "ok"
    status = await look()
    missing = status.unready()
    return not missing, "\n".join(missing) or ("standby" if status.standing_by else "ready")


async def answer_probes(control: Control, health: Health, admin_socket: Path) -> None:
    """Answer for ever; a socket that is removed, perhaps with all of /run, is made again.

    Raises:
        OSError: no socket can be made there.
    """

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with anyio.move_on_after(_ASKS_WITHIN):
                what = (await reader.readline()).decode(errors="replace").strip()
                if what in PROBES:
                    is_well, sentences = await verdict(what, control.status, health)
                    writer.write(f"{WELL if is_well else 'ill'}\n{sentences}\n".encode(errors="replace"))
        finally:  # also where the daemon ends meanwhile
            writer.close()

    path = probe_socket(admin_socket)
    while True:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        for left in path.parent.glob("probe-*.sock"):  # by containers that were killed
            if not listens(left):
                left.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(meet, sock=listen(path), start_serving=False)
        made = identity(path)
        try:
            await server.start_serving()  # which may be cancelled
            while identity(path) == made:  # noqa: ASYNC110  # the file system sets no event of ours
                await asyncio.sleep(_LOOK_AGAIN)
        finally:
            if identity(path) == made:
                path.unlink(missing_ok=True)
            server.close()
        while listens(path):  # noqa: ASYNC110  # an agent that was started beside us in this namespace has it, until it ends
            await asyncio.sleep(_LOOK_AGAIN)
