"""A grpclib server on a unix socket that appears ready, ends its connections well, and removes only its own.

`grpclib.server.Server.close()` cancels its handlers, sends neither trailers nor GOAWAY and leaves
connections open: a kubelet goes on believing the resource healthy; and on Python 3.12 and later
`wait_closed()` hangs while a client is connected. Neither is ever called here.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import structlog
from grpclib.const import Cardinality, Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import H2Protocol
from grpclib.server import Server

from agent.kubelet.transport.connection import Connection
from agent.kubelet.wire import Codec
from agent.runtime.errors import brief
from agent.runtime.limits import SOCKET_PATH_LIMIT

if TYPE_CHECKING:
    from collections.abc import Collection

    from grpclib._typing import IServable
    from grpclib.encoding.base import CodecBase

_CLOSE_TIMEOUT: Final = 0.2  # seconds in which a connection's last bytes must have left
_BACKLOG: Final = 64
_SENTENCE: Final = 2000
"""Characters of a refusal: hpack takes a minute for a megabyte of them, and a request may name a device as long as that."""

_ACCEPT_TURNS: Final = 4  # of the event loop, from a connection's arrival to its transport

log = structlog.get_logger()

_FileId = tuple[int, int]
"""Device and inode: no other file has them while our socket is open."""


def listen(path: Path, mode: int = 0o600) -> socket.socket:
    """A listening unix socket that appears under its name only when it can be connected to.

    Until then it is a dot-file with a short random name beside it; that is all a crash could leave.

    Raises:
        OSError: the directory is missing or not writable, or the path is longer than 107 bytes.
    """
    return _listen(path, mode)[0]


def _listen(path: Path, mode: int) -> tuple[socket.socket, _FileId]:
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        raise OSError(
            errno.ENAMETOOLONG, f"a socket's path has at most {SOCKET_PATH_LIMIT} bytes, not {size}", str(path)
        )
    fresh = path.with_name(f".{os.urandom(2).hex()}")  # never longer than "x.sock"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        os.fchmod(sock.fileno(), mode)  # the file's, without what the umask takes
        sock.bind(str(fresh))
        made = _set_mode(fresh, mode)
        sock.listen(_BACKLOG)
        fresh.rename(path)
    except BaseException as error:
        sock.close()
        with suppress(OSError):
            fresh.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    return sock, made


def _set_mode(path: Path, mode: int) -> _FileId:
    """Set the mode of the socket itself: never of what a link leads to that somebody put in its place."""
    file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISSOCK(found.st_mode):
            raise OSError(errno.EEXIST, "Something else is in the place of the socket", str(path))
        if stat.S_IMODE(found.st_mode) != mode:
            Path(f"/proc/self/fd/{file}").chmod(mode)
        return found.st_dev, found.st_ino
    finally:
        os.close(file)


def refusal(status: Status, sentence: str) -> GRPCError:
    """What a call raises to end with this sentence, which is cut to what fits into a header."""
    return GRPCError(status, brief(sentence, _SENTENCE))


class SocketServer(Server):
    """Serves on one unix socket; remembers its connections so that it can end them well."""

    # grpclib looks at each tenth connection which earlier ones have ended: 8 resources kept 15 MB of them
    __gc_interval__ = 1

    def __init__(
        self, handlers: Collection[IServable], path: Path, codec: CodecBase | None = None, *, directly: bool = False
    ) -> None:
        """Prepare.

        Args:
            handlers: the services.
            path: of the socket.
            codec: for their messages.
            directly: their unary methods do nothing with a call but receive its message and send a reply.
        """
        self.codec: Final = codec or Codec()
        super().__init__(handlers, codec=self.codec)
        unary = {name: it for name, it in self._mapping.items() if it.cardinality is Cardinality.UNARY_UNARY}
        self.direct: Final = unary if directly else {}
        """The methods that are answered without grpclib."""
        self.path = path
        self._connections: set[Connection] = set()
        self._disconnected = asyncio.Event()
        self._made: _FileId | None = None

    def _protocol_factory(self) -> H2Protocol:
        return Connection(super()._protocol_factory(), self)

    def connected(self, connection: Connection) -> None:
        """Note a client's connection; one that was accepted just before we stopped is turned away."""
        self._connections.add(connection)
        if self._server is None:
            connection.transport.abort()

    def flooded(self, connection: Connection) -> None:
        """Break the connection of a client that sends more frames than any use of it needs."""
        log.warning("connection-flooded", socket=str(self.path), then="its connection was broken")
        connection.transport.abort()

    def disconnected(self, connection: Connection) -> None:
        """Forget a client's connection, which is lost."""
        self._connections.discard(connection)
        if not self._connections:
            self._disconnected.set()

    async def open(self) -> None:
        """Listen and serve.

        Raises:
            OSError: as `listen`.
        """
        sock, self._made = _listen(self.path, 0o600)
        try:
            await self.start(sock=sock)
        except BaseException:
            self._loop.remove_reader(sock)  # cancelled while it started: the loop listens already
            sock.close()
            self._remove_socket()
            raise

    def is_reachable(self) -> bool:
        """Is the socket at our path still the one we made?"""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._made

    def _remove_socket(self) -> None:
        if self.is_reachable():
            with suppress(OSError):  # of a read-only disk; who has the lock next removes it
                self.path.unlink()

    async def shut_down(self, patience: float = 1.0) -> bool:
        """Stop listening, remove the socket, end calls and connections.

        Running calls (whose streams the caller has told to return) get `patience` seconds; late ones are
        cancelled, then every connection gets GOAWAY and is closed. True if every call ended by itself.
        Cancelled itself, it breaks all connections at once.
        """
        server, self._server = self._server, None
        if server is None:
            return True
        self._remove_socket()
        try:
            await self._finish_accepting(server)
            server.close()
            late = await self._end_calls(patience)
            for connection in list(self._connections):
                connection.say_goodbye()
            await self.wait_disconnected(_CLOSE_TIMEOUT)
        finally:
            server.close()
            for handler in self._handlers:
                handler.close()
            self.reset_connections()
        await asyncio.sleep(0)  # lets connection_lost run
        return not late

    async def _finish_accepting(self, server: asyncio.AbstractServer) -> None:
        # asyncio forgets, open, a connection whose server closes between accept and the making of its transport
        assert isinstance(server, asyncio.Server)
        for sock in server.sockets:
            self._loop.remove_reader(sock.fileno())
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)

    async def _end_calls(self, patience: float) -> set[asyncio.Task[None]]:
        """Wait for the running calls; cancel and return the late ones."""
        calls = {task for handler in self._handlers for task in handler._tasks.values() if not task.done()}
        if not calls:
            return set()
        _, late = await asyncio.wait(calls, timeout=patience)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=_CLOSE_TIMEOUT)
        return late

    def reset_connections(self) -> None:
        """Break every connection at once: for a client that does not even read our trailers."""
        for connection in list(self._connections):
            connection.transport.abort()

    async def wait_read(self, patience: float) -> None:
        """Wait until each client has read all that was sent to it, so many seconds at most."""
        with anyio.move_on_after(patience):
            for connection in list(self._connections):
                await connection.read_by_client()

    async def wait_disconnected(self, patience: float = 0.5) -> bool:
        """After a stream ended: wait until the kubelet has closed its connection. Only then register.

        Registering earlier lets the new registration overtake the old stream's end: the kubelet then drops
        the *new* client, keeps the devices healthy, and does not notice when we die (kubelet contract: A2).
        False means it did not close it: it had forgotten this client; registering now repairs that.
        """
        if not self._connections:
            return True
        self._disconnected.clear()
        try:
            with anyio.fail_after(patience):
                await self._disconnected.wait()
        except TimeoutError:
            return not self._connections  # where this process stood still, both have come by now
        return True
