"""One client's connection to a server of ours: a bound on what it sends, its unary calls, and writes that leave in one piece.

Beneath grpclib lies our HTTP/2 (`http2.py`). A kubelet sends a few frames for each call, and window updates for what it reads.

grpclib has a stream, a buffer, four events and two context managers for each call, a tenth of an Allocate's time: a unary call is
answered straight from HTTP/2. Its handler begins when its request is whole, and its reply leaves in one write. What a kubelet does
not send (a deadline, another content type) goes grpclib's way, and is refused there where it is wrong.

grpclib writes every HTTP/2 frame by itself: an Allocate reply is three writes, a list of 10,000 devices twenty. Each is a system
call and wakes the other side, which can do nothing with a part: `GatheringTransport` sends what one turn of the loop writes.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import termios
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import grpclib.protocol
from grpclib.const import Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import encode_grpc_message
from grpclib.protocol import EventsProcessor, H2Protocol
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

from agent.kubelet.transport.http2 import ServerConnection

if TYPE_CHECKING:
    from grpclib.encoding.base import CodecBase
    from h2.connection import H2Connection

    from agent.kubelet.transport.server import SocketServer

_BURST: Final = 10_000.0  # frames
_PER_SECOND: Final = 1_000.0  # frames
_BYTES_FOR_FRAME: Final = 1024  # that we sent: for these a client may send a frame more, a window update perhaps

_MOST_BYTES: Final = 64 << 10
"""Gathered before they are sent all the same: asyncio's high-water mark, so that a client that does not read still
stops the sender where it would have without us."""

_HEAD: Final = 5  # bytes of a gRPC message: is it compressed, and its length
_PLAIN: Final = {":method": "POST", "te": "trailers"}
_TYPES: Final = {"application/grpc", "application/grpc+proto"}
_ANSWER: Final = ((":status", "200"), ("content-type", "application/grpc+proto"))
_DONE: Final = (("grpc-status", "0"),)

_grpclibs = logging.getLogger("grpclib.server")  # as its own calls do


class GatheringTransport(asyncio.Transport):
    """A transport in front of another, whose protocol is told of pauses as before."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._gathered = bytearray()
        self.written = 0
        """Bytes that have been written in all."""

    def pause_reading(self) -> None:
        """Leave what comes with the kernel."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Have this sent at the end of this turn."""
        if not self._gathered:
            self._loop.call_soon(self._send)
        self._gathered += data
        self.written += len(data)
        if len(self._gathered) >= _MOST_BYTES:
            self._send()

    def _send(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        if gathered and not self._transport.is_closing():
            self._transport.write(gathered)

    def is_unread(self) -> bool:
        """Has the other side not read yet what was written? SIOCOUTQ tells (unix_outq_len, net/unix/af_unix.c)."""
        if self._gathered or self._transport.get_write_buffer_size():
            return True
        sock = self._transport.get_extra_info("socket")
        return sock.fileno() >= 0 and any(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))

    def close(self) -> None:
        """Send what was written, then close."""
        self._send()
        self._transport.close()

    def abort(self) -> None:
        """Close at once, sending nothing."""
        self._gathered = bytearray()
        self._transport.abort()

    def is_closing(self) -> bool:
        """Is it closed or about to be?"""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the socket."""
        return self._transport.get_extra_info(name, default)


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
    """One client's connection; tells its server when it is made and lost."""

    transport: GatheringTransport
    """What it sends by; grpclib forgets its own when it closes."""

    def __init__(self, prepared: H2Protocol, server: SocketServer) -> None:
        """Take the place of a connection that grpclib has prepared."""
        super().__init__(prepared.handler, prepared.config, prepared.h2_config)
        self._server = server
        self._http2, self._allowance = ServerConnection(), Allowance()
        self._has_read = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Do what grpclib's own does, with our HTTP/2 in the place of h2's."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = GatheringTransport(transport)
        http2 = cast("H2Connection", self._http2)
        self.connection = grpclib.protocol.Connection(http2, self.transport, config=self.config)
        # our greeting leaves with the answer to the client's, which comes at once (RFC 9113, 3.4): one write less
        self.connection.initialize()
        self.processor = EventsProcessor(self.handler, self.connection)
        self.processor.processors[PingAckReceived] = lambda _: self._has_read.set()
        if self._server.direct:
            UnaryCalls(self._http2, self.processor, self._server.direct, self._server.codec)
        self._server.connected(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the calls."""
        super().connection_lost(exc)
        self._has_read.set()
        self._http2.release()
        self._server.disconnected(self)

    def data_received(self, data: bytes) -> None:
        """Read as many frames as one turn of the loop may, and the rest in the next turns."""
        was_behind, before = self._http2.is_behind, self._http2.frames
        super().data_received(data)
        if not self._allowance.take(self._http2.frames - before, self.transport.written):
            self._server.flooded(self)
        elif self._http2.is_behind:
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
            self._http2.ping(bytes(8))
            self.connection.flush()
            await self._has_read.wait()

    def say_goodbye(self) -> None:
        """GOAWAY and close; the transport still sends what it holds."""
        if not self.connection.is_closing():
            self._http2.close_connection()
            self.connection.flush()
            self.connection.close()


class UnaryCalls:
    """The unary calls of one connection; takes part in grpclib's dealing with what comes."""

    def __init__(
        self, http2: ServerConnection, processor: EventsProcessor, handlers: Mapping[str, Handler], codec: CodecBase
    ) -> None:
        """Prepare.

        Args:
            http2: the connection.
            processor: has what is not ours.
            handlers: of the unary methods, by the paths of their calls.
            codec: for their messages.
        """
        self.http2, self.connection, self.codec = http2, processor.connection, codec
        self.room = asyncio.Event()
        """Set when the client allows more bytes."""
        self._handlers = handlers
        self._server: Any = processor.handler
        """Its `_tasks` are the calls under way, grpclib's and ours: it ends them all with the connection, and replaces them at times."""
        self._calls: dict[int, Call] = {}
        grpclibs = processor.processors
        self._grpclibs: Mapping[type[Event], Any] = dict(grpclibs)
        grpclibs[RequestReceived] = self._begin
        grpclibs[DataReceived] = grpclibs[StreamEnded] = self._take
        grpclibs[StreamReset] = self._reset
        grpclibs[WindowUpdated] = grpclibs[RemoteSettingsChanged] = self._widen

    def _begin(self, event: RequestReceived) -> None:
        headers = dict(cast("list[tuple[str, str]]", event.headers))
        handler = self._handlers.get(headers[":path"])
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
        if call not in self._server._tasks:
            call.data = event.data if isinstance(event, DataReceived) else b""
            task = self._server._tasks[call] = asyncio.get_running_loop().create_task(call.run())
            task.add_done_callback(lambda _: self.forget(call))

    def forget(self, call: Call) -> None:
        """Forget a call that has ended."""
        self._server._tasks.pop(call, None)
        self._calls.pop(call.stream_id, None)

    def _reset(self, event: StreamReset) -> None:
        if (call := self._calls.pop(event.stream_id, None)) is None:
            self._grpclibs[StreamReset](event)
        elif (task := self._server._tasks.get(call)) is not None:
            task.cancel()

    def _widen(self, event: Event) -> None:
        self._grpclibs[type(event)](event)
        self.room.set()


class Call(Struct, eq=False):
    """One call; a handler has it in the place of grpclib's stream."""

    calls: UnaryCalls
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
        return self.calls.codec.decode(data[_HEAD:end], self.handler.request_type)

    async def send_message(self, message: Any) -> None:
        """Send the reply, once.

        Raises:
            StreamClosedError: the client has ended the call.
        """
        data, http2, room = self.calls.codec.encode(message, self.handler.reply_type), self.calls.http2, self.calls.room
        data = b"\0" + len(data).to_bytes(4, "big") + data
        await self._may_write()
        http2.send_headers(self.stream_id, _ANSWER)
        self.is_answered = True
        while data:
            most = min(http2.local_flow_control_window(self.stream_id), http2.max_outbound_frame_size)
            if most > 0:
                http2.send_data(self.stream_id, data[:most])
                data = data[most:]
                self.calls.connection.flush()
            else:
                room.clear()
                await room.wait()
            await self._may_write()

    async def _may_write(self) -> None:
        """Wait while the client does not read; others write meanwhile.

        Raises:
            StreamClosedError: the client has ended the call.
        """
        if not self.calls.connection.write_ready.is_set():
            await self.calls.connection.write_ready.wait()
        if self.stream_id not in self.calls.http2.streams:
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
        http2 = self.calls.http2
        if status is Status.OK:
            http2.send_headers(self.stream_id, _DONE, end_stream=True)
        else:
            said = (("grpc-status", str(status.value)), ("grpc-message", encode_grpc_message(text)))
            http2.send_headers(self.stream_id, said if self.is_answered else _ANSWER + said, end_stream=True)
            if self.stream_id in http2.streams:  # it goes on sending what nobody reads
                http2.reset_stream(self.stream_id, ErrorCodes.NO_ERROR)
        self.calls.connection.flush()
