"""A grpclib server on a unix socket that appears ready, ends its connections well, and removes only its own.

`grpclib.server.Server.close()` cancels its handlers, sends neither trailers nor GOAWAY and leaves
connections open: a kubelet goes on believing the resource healthy; and on Python 3.12 and later
`wait_closed()` hangs while a client is connected. Neither is ever called here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from grpclib.protocol import H2Protocol
from grpclib.server import Server
from h2.exceptions import ProtocolError

from agent.kubelet.wire import Codec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from grpclib._typing import IServable

_CLOSE_TIMEOUT: Final = 0.2  # seconds in which a connection's last bytes must have left
_BACKLOG: Final = 64


def listen(path: Path, mode: int = 0o600) -> socket.socket:
    """A listening unix socket that appears under its name only when it can be connected to.

    Raises:
        OSError: the directory is missing or not writable, or the path is longer than 107 bytes.
    """
    fresh = path.with_name(f".{os.getpid()}")  # never longer than the path itself
    fresh.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setblocking(False)
        sock.bind(str(fresh))
        fresh.chmod(mode)
        sock.listen(_BACKLOG)
        fresh.rename(path)
    except BaseException:
        sock.close()
        raise
    return sock


class _Connection(H2Protocol):
    """One client's connection; tells its server when it is made and lost."""

    def __init__(self, protocol: H2Protocol, register: set[_Connection], on_lost: Callable[[], None]) -> None:
        super().__init__(protocol.handler, protocol.config, protocol.h2_config)
        self._register = register
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._register.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._register.discard(self)
        super().connection_lost(exc)
        self._on_lost()

    @property
    def transport(self) -> asyncio.Transport:
        transport: asyncio.Transport = self.connection._transport
        return transport

    def say_goodbye(self) -> None:
        """GOAWAY and close; the transport still sends what it holds."""
        if self.connection.is_closing():
            return
        try:
            self.connection._connection.close_connection()  # GOAWAY, NO_ERROR
            self.connection.flush()
        except ProtocolError:
            pass  # the other side closed the connection in this moment
        self.connection.close()


class SocketServer(Server):
    """Serves on one unix socket; remembers its connections so that it can end them well."""

    def __init__(self, handlers: Collection[IServable], path: Path) -> None:
        super().__init__(handlers, codec=Codec())
        self.path = path
        self._connections: set[_Connection] = set()
        self._disconnected = asyncio.Event()
        self._inode = 0

    def _protocol_factory(self) -> H2Protocol:
        return _Connection(super()._protocol_factory(), self._connections, self._on_lost)

    def _on_lost(self) -> None:
        if not self._connections:
            self._disconnected.set()

    async def open(self) -> None:
        """Listen and serve.

        Raises:
            OSError: as `listen`.
        """
        sock = listen(self.path)
        self._inode = self.path.lstat().st_ino
        await self.start(sock=sock)

    def is_reachable(self) -> bool:
        """Is the socket at our path still the one we made?"""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        return found.st_ino == self._inode and stat.S_ISSOCK(found.st_mode)

    async def shut_down(self, patience: float = 1.0) -> bool:
        """Stop listening, remove the socket, end calls and connections.

        Running calls (whose streams the caller has told to return) get `patience` seconds; late ones are
        cancelled, then every connection gets GOAWAY and is closed. True if every call ended by itself.
        """
        if self._server is None:
            return True
        if self.is_reachable():
            self.path.unlink(missing_ok=True)
        self._server.close()
        self._server = None
        calls = {task for handler in self._handlers for task in handler._tasks.values() if not task.done()}
        late: set[asyncio.Task[None]] = set()
        if calls:
            _, late = await asyncio.wait(calls, timeout=patience)
        for handler in self._handlers:
            handler.close()
        if late:
            await asyncio.wait(late, timeout=_CLOSE_TIMEOUT)
        for connection in list(self._connections):
            connection.say_goodbye()
        if not await self.wait_disconnected(_CLOSE_TIMEOUT):
            self.reset_connections()
            await asyncio.sleep(0)  # lets connection_lost run
        return not late

    def reset_connections(self) -> None:
        """Break every connection at once: for a client that does not even read our trailers."""
        for connection in self._connections:
            connection.transport.abort()

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
            async with asyncio.timeout(patience):
                await self._disconnected.wait()
        except TimeoutError:
            return False
        return True
