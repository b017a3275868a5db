"""A grpclib server on a unix socket that appears ready, ends its connections well, and removes only its own; and its connections.

`grpclib.server.Server.close()` cancels its handlers, sends neither trailers nor GOAWAY and leaves
connections open: a kubelet goes on believing the resource healthy; and on Python 3.12 and later
`wait_closed()` hangs while a client is connected. Neither is ever called here.

Beneath grpclib lies our HTTP/2 (`http2.py`). grpclib has a stream, a buffer, four events and two context managers for each call, a
tenth of an Allocate's time: a unary call is answered straight from HTTP/2. Its handler begins when its request is whole, and its
reply leaves in one write. What a kubelet does not send (a deadline, another content type) goes grpclib's way, and is refused
there where it is wrong.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
import grpclib.protocol
import structlog
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import encode_grpc_message
from grpclib.protocol import EventsProcessor, H2Protocol
from grpclib.server import Server
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import StreamClosedError
from msgspec import Struct

from agent.kubelet.client import GatheringTransport
from agent.kubelet.http2 import ServerConnection
from agent.kubelet.wire import Codec
from agent.runtime.errors import brief
from agent.runtime.limits import SOCKET_PATH_LIMIT
from agent.runtime.pacing import Doorbell

if TYPE_CHECKING:
    from collections.abc import Collection

    from grpclib._typing import IServable
    from grpclib.encoding.base import CodecBase
    from h2.connection import H2Connection

_CLOSE_TIMEOUT: Final = 0.2  # seconds in which a connection's last bytes must have left
_BACKLOG: Final = 64
_SENTENCE: Final = 2000
"""Characters of a refusal: hpack takes a minute for a megabyte of them, and a request may name a device as long as that."""

_ACCEPT_TURNS: Final = 4  # of the event loop, from a connection's arrival to its transport

_BURST: Final = 10_000.0  # frames
_PER_SECOND: Final = 1_000.0  # frames
_BYTES_FOR_FRAME: Final = 1024  # that we sent: for these a client may send a frame more, a window update perhaps

_HEAD: Final = 5  # bytes of a gRPC message: is it compressed, and its length
_PLAIN: Final = {":method": "POST", "te": "trailers"}
_TYPES: Final = {"application/grpc", "application/grpc+proto"}
_ANSWER: Final = ((":status", "200"), ("content-type", "application/grpc+proto"))
_DONE: Final = (("grpc-status", "0"),)

_grpclibs = logging.getLogger("grpclib.server")  # as its own calls do
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
    """Set the mode of the socket itself, and never of the target of a link that has been put in its place."""
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
        self._disconnected = Doorbell()
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
        """Whether the socket at our path is still the one we made."""
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
        return await self._disconnected.until(lambda: not self._connections, patience)


# --- one client's connection ---


class Allowance:
    """How many frames a client may still send; it earns more with time, and with the bytes that it is sent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left, self._at, self._sent = _BURST, clock(), 0

    def take(self, frames: int, sent: int) -> bool:
        """Take this for frames that have come; False if they were too many. `sent` is the bytes sent to the client in all."""
        now = self._clock()
        earned = (now - self._at) * _PER_SECOND
        left = self._left + (sent - self._sent) / _BYTES_FOR_FRAME
        self._left, self._at, self._sent = max(left, min(left + earned, _BURST)) - frames, now, sent
        return self._left >= 0


class Connection(H2Protocol):
    """One client's connection; tells its server when it is made and lost, and takes the unary calls before grpclib does."""

    transport: GatheringTransport
    """What it sends by; grpclib forgets its own when it closes."""

    def __init__(self, prepared: H2Protocol, server: SocketServer) -> None:
        """Take the place of a connection that grpclib has prepared."""
        super().__init__(prepared.handler, prepared.config, prepared.h2_config)
        self.server = server
        self.http2, self._allowance = ServerConnection(), Allowance()
        self.room = asyncio.Event()
        """Set when the client allows more bytes."""
        self._has_read = asyncio.Event()
        self._calls: dict[int, Call] = {}
        self._running: Any = prepared.handler
        """Its `_tasks` are the calls under way, grpclib's and ours: it ends them all with the connection, and replaces them at times."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Do what grpclib's own does, with our HTTP/2 in the place of h2's."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = GatheringTransport(transport)
        http2 = cast("H2Connection", self.http2)
        self.connection = grpclib.protocol.Connection(http2, self.transport, config=self.config)
        # our greeting leaves with the answer to the client's, which comes at once (RFC 9113, 3.4): one write less
        self.connection.initialize()
        self.processor = EventsProcessor(self.handler, self.connection)
        processors = self.processor.processors
        processors[PingAckReceived] = lambda _: self._has_read.set()
        if self.server.direct:
            self._grpclibs: Mapping[type[Event], Any] = dict(processors)
            processors[RequestReceived] = self._begin
            processors[DataReceived] = processors[StreamEnded] = self._take
            processors[StreamReset] = self._reset
            processors[WindowUpdated] = processors[RemoteSettingsChanged] = self._widen
        self.server.connected(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the calls."""
        super().connection_lost(exc)
        self._has_read.set()
        self.http2.release()
        self.server.disconnected(self)

    def data_received(self, data: bytes) -> None:
        """Read as many frames as one turn of the loop may, and the rest in the next turns."""
        was_behind, before = self.http2.is_behind, self.http2.frames
        super().data_received(data)
        if not self._allowance.take(self.http2.frames - before, self.transport.written):
            self.server.flooded(self)
        elif self.http2.is_behind:
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._read_on)
        elif was_behind:
            self.transport.resume_reading()

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.data_received(b"")

    async def read_by_client(self) -> None:
        """Wait until the client has read all that was sent, or is gone: it answers a PING in its turn (RFC 9113, 6.7)."""
        if not self.connection.is_closing():
            self._has_read.clear()
            self.http2.ping(bytes(8))
            self.connection.flush()
            await self._has_read.wait()

    def say_goodbye(self) -> None:
        """GOAWAY and close; the transport still sends what it holds."""
        if not self.connection.is_closing():
            self.http2.close_connection()
            self.connection.flush()
            self.connection.close()

    # --- unary calls ---

    def _begin(self, event: RequestReceived) -> None:
        headers = dict(cast("list[tuple[str, str]]", event.headers))
        handler = self.server.direct.get(headers[":path"])
        is_plain = all(headers.get(name) == value for name, value in _PLAIN.items()) and "grpc-timeout" not in headers
        if handler is None or not is_plain or headers.get("content-type") not in _TYPES:
            self._grpclibs[RequestReceived](event)
        else:
            self._calls[event.stream_id] = Call(self, event.stream_id, handler)

    def _take(self, event: DataReceived | StreamEnded) -> None:
        """Start the call, unless it is under way: what comes after its message means nothing."""
        if (call := self._calls.get(event.stream_id)) is None:
            self._grpclibs[type(event)](event)
            return
        if isinstance(event, DataReceived):
            self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        if call not in self._running._tasks:
            call.data = event.data if isinstance(event, DataReceived) else b""
            task = self._running._tasks[call] = asyncio.get_running_loop().create_task(call.run())
            task.add_done_callback(lambda _: self.forget(call))

    def forget(self, call: Call) -> None:
        """Forget a call that has ended."""
        self._running._tasks.pop(call, None)
        self._calls.pop(call.stream_id, None)

    def _reset(self, event: StreamReset) -> None:
        if (call := self._calls.pop(event.stream_id, None)) is None:
            self._grpclibs[StreamReset](event)
        elif (task := self._running._tasks.get(call)) is not None:
            task.cancel()

    def _widen(self, event: Event) -> None:
        self._grpclibs[type(event)](event)
        self.room.set()


class Call(Struct, eq=False):
    """One call; a handler has it in the place of grpclib's stream."""

    client: Connection
    stream_id: int
    handler: Handler
    data: bytes = b""
    """Its message, with gRPC's head."""
    is_answered: bool = False

    async def recv_message(self) -> Any:
        """The request's message; None if it has none.

        Raises:
            NotImplementedError: it is compressed.
            AssertionError: it is cut off.
        """
        data, self.data = self.data, b""
        if not data:
            return None
        if data[0]:
            raise NotImplementedError("Compression not implemented")
        end = _HEAD + int.from_bytes(data[1:_HEAD], "big")  # no call of ours has another message behind it
        if len(data) < end:
            raise AssertionError("Received less data than expected")
        return self.client.server.codec.decode(data[_HEAD:end], self.handler.request_type)

    async def send_message(self, message: Any) -> None:
        """Send the reply, once.

        Raises:
            StreamClosedError: the client has ended the call.
        """
        data, http2, room = (
            self.client.server.codec.encode(message, self.handler.reply_type),
            self.client.http2,
            self.client.room,
        )
        data = b"\0" + len(data).to_bytes(4, "big") + data
        await self._may_write()
        http2.send_headers(self.stream_id, _ANSWER)
        self.is_answered = True
        while data:
            most = min(http2.local_flow_control_window(self.stream_id), http2.max_outbound_frame_size)
            if most > 0:
                http2.send_data(self.stream_id, data[:most])
                data = data[most:]
                self.client.connection.flush()
            else:
                room.clear()
                await room.wait()
            await self._may_write()

    async def _may_write(self) -> None:
        """Wait while the client does not read; others write meanwhile.

        Raises:
            StreamClosedError: the client has ended the call.
        """
        if not self.client.connection.write_ready.is_set():
            await self.client.connection.write_ready.wait()
        if self.stream_id not in self.client.http2.streams:
            raise StreamClosedError(self.stream_id)

    async def run(self) -> None:
        """Have the handler answer, and end the call."""
        status, text = Status.UNKNOWN, "Internal Server Error"
        try:
            await self.handler.func(self)
            if self.is_answered:
                status = Status.OK
        except GRPCError as error:
            status, text = error.status, error.message or ""
        except StreamClosedError:
            return
        except Exception:  # noqa: BLE001  # whatever a handler raises, it ends this call alone
            _grpclibs.exception("Application error")
        try:
            await self._may_write()
        except StreamClosedError:
            return
        http2 = self.client.http2
        if status is Status.OK:
            http2.send_headers(self.stream_id, _DONE, end_stream=True)
        else:
            said = (("grpc-status", str(status.value)), ("grpc-message", encode_grpc_message(text)))
            http2.send_headers(self.stream_id, said if self.is_answered else _ANSWER + said, end_stream=True)
            if self.stream_id in http2.streams:  # it goes on sending what is not read
                http2.reset_stream(self.stream_id, ErrorCodes.NO_ERROR)
        self.client.connection.flush()
