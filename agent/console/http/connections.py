"""Accepts connections and speaks HTTP on them (uvicorn's h11 protocol), so that no client costs more than itself.

Each connection carries one request. There are `MOST` of them at a time: a newcomer takes the place of the oldest that
has not asked anything yet, or of one that does not read its answer. What is accepted in a second is limited, too, and
so is the time that a client has for each step. uvicorn's own server is not used: it wakes ten times a second, takes
over signals, and accepts whatever comes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import anyio
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from agent.runtime.supervision.problems import Problems
from agent.runtime.supervision.resource_shortage import AGAIN, Shortage
from backends.errors import is_short

MOST: Final = 64
"""Connections at a time."""

REQUEST_WITHIN: Final = 5.0
"""Seconds from the connection to the end of the request's head, however it trickles in."""

HURRIED_WITHIN: Final = 1.0
"""Seconds for the same where half of all places are taken."""

READ_WITHIN: Final = 10.0
"""Seconds that a client may leave 32 kB of its answer unread, or its end."""

STALLED_AFTER: Final = 1.0
"""Seconds of that, after which another client may have its place."""

_PACE: Final = 0.002  # seconds between two connections: a client that hammers costs a third of a core, and waits
_HEAD_BYTES: Final = 16 * 1024  # a browser's cookies for the same host fit
_BUFFER_BYTES: Final = 32 * 1024  # of ours for one connection; the kernel's are twice SO_SNDBUF
_UNACKNOWLEDGED: Final = 30_000  # milliseconds (tcp(7), TCP_USER_TIMEOUT): the viewer's laptop has been closed
_END_WITHIN: Final = 1.0  # seconds for requests under way when we stop
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"retry-after: 5\r\ncontent-length: 30\r\n\r\nFairlead has too many clients\n"
)


class Connection(H11Protocol):
    """One client and its one request; each step has its time."""

    def __init__(self, config: Config, state: ServerState, present: dict[Connection, None]) -> None:
        """`present` has all connections, the oldest first."""
        super().__init__(config, state, {})
        self._present = present
        self._deadline: asyncio.TimerHandle | None = None
        self._paused = 0.0

    @property
    def asking(self) -> bool:
        """Is its request still to come?"""
        return self.cycle is None

    @property
    def stalled(self) -> bool:
        """Has it not read its answer for a while?"""
        return self.flow.write_paused and self.loop.time() - self._paused >= STALLED_AFTER

    # as uvicorn narrows it: of a socket, asyncio makes no other transport
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: its request is awaited."""
        super().connection_made(transport)
        self._present[self] = None
        transport.set_write_buffer_limits(high=_BUFFER_BYTES)
        self._within(REQUEST_WITHIN if len(self._present) <= MOST // 2 else HURRIED_WITHIN)

    def data_received(self, data: bytes) -> None:
        """Bytes of the request have come."""
        asking = self.asking
        super().data_received(data)
        if asking and not self.asking:
            self._within(None)

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        super().pause_writing()
        self._paused = self.loop.time()
        self._within(READ_WITHIN)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._within(READ_WITHIN if self.transport.is_closing() else None)

    def on_response_complete(self) -> None:
        """All is written; the connection closes once the client has read it."""
        super().on_response_complete()
        self._within(READ_WITHIN)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._present.pop(self, None)
        self._within(None)
        super().connection_lost(exc)

    def cut(self) -> None:
        """End the connection at once."""
        self._present.pop(self, None)
        self.transport.abort()

    def _within(self, seconds: float | None) -> None:
        """Cut the connection after so many seconds; None calls that off."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.cut)


class Reception:
    """Accepts connections."""

    def __init__(self, app: ASGIApp, most: int = MOST, problems: Problems | None = None) -> None:
        self._config = Config(
            app, loop="none", http=H11Protocol, ws="none", lifespan="off", interface="asgi3",
            log_config=None, access_log=False, proxy_headers=False, h11_max_incomplete_event_size=_HEAD_BYTES,
        )  # fmt: skip
        self._state = ServerState()
        self._present: dict[Connection, None] = {}
        self._most = most
        self._shortage = Shortage(problems or Problems())
        # it would log a line for every client that sends garbage; the app reports failures of ours
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)

    async def receive(self, listening: Sequence[socket.socket]) -> None:
        """Serve all who connect, until cancelled."""
        self._config.load()
        try:
            async with anyio.create_task_group() as tasks:
                for sock in listening:
                    tasks.start_soon(self._accept, sock)
        finally:
            with anyio.CancelScope(shield=True):
                await self._end()

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except ConnectionAbortedError:
                continue  # it was gone before its turn came
            except OSError as error:
                if not is_short(error):
                    raise
                self._shortage.tell(error)
                await asyncio.sleep(AGAIN)
                continue
            if self._make_room():
                _limit(accepted)
                await loop.connect_accepted_socket(
                    lambda: Connection(self._config, self._state, self._present), accepted
                )
            else:
                _refuse(accepted)
            await asyncio.sleep(_PACE)

    def _make_room(self) -> bool:
        """Is there room for one more, if need be in the place of the oldest that wastes its own?"""
        if len(self._present) < self._most:
            return True
        wasteful = [it for it in self._present if it.asking] or [it for it in self._present if it.stalled]
        if wasteful:
            wasteful[0].cut()
        return bool(wasteful)

    async def _end(self) -> None:
        """Cut all connections, and wait for the tasks that answer them."""
        for connection in list(self._present):
            connection.cut()
        if tasks := set(self._state.tasks):
            _, late = await asyncio.wait(tasks, timeout=_END_WITHIN)
            for task in late:
                task.cancel()


def _limit(sock: socket.socket) -> None:
    """Bound what the kernel keeps for a client, and for how long if it has vanished."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED)


def _refuse(sock: socket.socket) -> None:
    with sock, suppress(OSError):  # it is gone; or does not read, which is its own loss
        sock.setblocking(False)
        with suppress(BlockingIOError):
            sock.recv(_HEAD_BYTES)  # closing with something unread would take our answer from it
        sock.send(_FULL)
