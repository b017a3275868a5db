"""Serves HTTP on the daemon's event loop, as one supervised part of it: sockets, connections, and who is answered.

uvicorn's h11 protocol reads each connection. Its own server is not used: it wakes ten times a second, takes over signals,
and accepts whatever comes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import structlog
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from agent.console.control import Control
from agent.console.http.app import Face
from agent.console.service import Health
from agent.kubelet.server import listen as listen_at
from agent.runtime.counts import Counts
from agent.runtime.problems import Problems
from agent.runtime.process import AGAIN, Shortage
from agent.runtime.watchdog import supervise
from backends.errors import is_short

log = structlog.get_logger()


async def serve(
    control: Control,
    health: Health,
    counts: Counts,
    listen: str,
    hosts: Sequence[str] = (),
    problems: Problems | None = None,
    listeners: list[socket.socket] | None = None,
    given: Sequence[socket.socket] = (),
) -> None:
    """Serve at "host:port" or "unix:/path" until cancelled.

    Args:
        control: is asked.
        health: of the daemon itself.
        counts: are shown.
        listen: where.
        hosts: names of this node beside its own.
        problems: is told what does not work.
        listeners: has the sockets meanwhile that another agent may go on listening at.
        given: such sockets of the agent before us.

    Raises:
        OSError: one cannot listen there.
    """
    face = Face(control, health, counts, problems)
    async with listening(listen, given) as sockets, anyio.create_task_group() as tasks:
        tasks.start_soon(supervise, "live page", face.viewers.run)
        log.info("http-served", listen=listen)
        shared = [it for it in sockets if it.family != socket.AF_UNIX]  # a path is another's by itself
        listeners = [] if listeners is None else listeners
        listeners[:] = shared
        try:
            await Reception(OnlyFor(face, Hosts(own_names(listen, hosts))), problems=problems).receive(sockets)
        finally:
            listeners.clear()


# --- the sockets that HTTP is served on: TCP at a host's addresses, or a unix socket that appears ready ---

UNIX_MODE: Final = 0o660
"""Of the unix socket: root, and the group of a directory that hands its own on (setgid)."""

_BACKLOG: Final = 4096
"""Connections that the kernel keeps until they are accepted, one after the other, or have sent nothing yet."""

_SILENT: Final = 5
"""Seconds, about, for which it keeps a connection from us that sends nothing (tcp(7), TCP_DEFER_ACCEPT)."""


@asynccontextmanager
async def listening(address: str, given: Sequence[socket.socket] = ()) -> AsyncIterator[Sequence[socket.socket]]:
    """Listen at "host:port" (at every address of the host) or "unix:/path" while in this context.

    `given` are sockets that an agent before us listened at: those at the same addresses go on. All of them are closed.

    Raises:
        OSError: one cannot listen there; the message says where.
    """
    scheme, _, path = address.partition(":")
    with ExitStack() as open_ones:
        there = {_where(open_ones.enter_context(sock)): sock for sock in given}
        if scheme == "unix":
            yield [_unix(Path(path), open_ones)]
        else:
            host, _, port = address.rpartition(":")
            found = await _resolved(host.strip("[]"), int(port))
            yield [
                there.get((family, where)) or open_ones.enter_context(_tcp(family, where)) for family, where in found
            ]


def _where(sock: socket.socket) -> tuple[int, tuple[str, int]]:
    return sock.family, sock.getsockname()[:2]


def _unix(path: Path, cleanup: ExitStack) -> socket.socket:
    sock = cleanup.enter_context(listen_at(path, UNIX_MODE))
    made = path.lstat()

    def remove() -> None:
        with suppress(OSError):
            if os.path.samestat(path.lstat(), made):
                path.unlink()

    cleanup.callback(remove)  # before it is closed: until then no other file can have its inode number
    return sock


async def _resolved(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """The addresses of a host, each once; "localhost" may have two."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return list({where: (family, (str(where[0]), port)) for family, _, _, _, where in found}.values())


def _tcp(family: socket.AddressFamily, where: tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart must not wait for old connections' ends
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != "::"))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {where[0]} port {where[1]}: {error.strerror}") from error
    return sock


# --- which Host headers are answered: names and addresses of this node alone, against DNS rebinding ---
#
# A page in a browser on the node may have its own name lead to 127.0.0.1 (DNS rebinding) and then read what we say;
# its requests bear that name. An address in the header is no name that could be led elsewhere. A unix socket no
# browser reaches.

_PORT = re.compile(r":[0-9]*\Z")


class Hosts:
    """The Host headers that are answered."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take these names; `localhost` and every address come by themselves."""
        self._names = frozenset(_folded(name) for name in names) - {""}

    def include(self, header: str) -> bool:
        """Whether this Host header is one of ours."""
        name = _folded(_PORT.sub("", header))
        return name == "localhost" or name.endswith(".localhost") or name in self._names or _is_address(name)


def own_names(listen: str, configured: Iterable[str] = ()) -> list[str]:
    """What this node is called: by the configuration, by its kernel, by the Downward API."""
    return [*configured, listen.rpartition(":")[0], socket.gethostname(), os.environ.get("NODE_NAME", "")]


def _folded(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class OnlyFor:
    """The application, for requests to these hosts alone."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        is_tcp = (scope.get("server") or ("", None))[1] is not None
        said = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if is_tcp and not all(map(self._hosts.include, said)):
            why = "this node does not go by that name; if it should, add the name to hosts in [http]\n"
            await PlainTextResponse(why, 421, {"connection": "close", "cache-control": "no-store"})(
                scope, receive, send
            )
        else:
            await self._app(scope, receive, send)


# --- connections: no client costs more than itself ---
#
# Each carries one request. There are `MOST` of them at a time: a newcomer takes the place of the oldest that has not asked
# anything yet, or of one that does not read its answer. What is accepted in a second is limited, too, and so is the time
# that a client has for each step.


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
        """Whether its request is still to come."""
        return self.cycle is None

    @property
    def stalled(self) -> bool:
        """Whether it has not read its answer for a while."""
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
        """Make room for one more, if need be by cutting the oldest that wastes its place; returns whether there is room."""
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
