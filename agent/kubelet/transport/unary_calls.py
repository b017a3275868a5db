"""Answers unary calls straight from HTTP/2: a handler begins when its request is whole, and its reply leaves in one write.

grpclib has a stream, a buffer, four events and two context managers for each call, a tenth of an Allocate's time. What a
kubelet does not send (a deadline, another content type) goes grpclib's way, and is refused there where it is wrong.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from grpclib.const import Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.metadata import encode_grpc_message
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    Event,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import StreamClosedError

if TYPE_CHECKING:
    import grpclib.server
    from grpclib.encoding.base import CodecBase
    from grpclib.protocol import EventsProcessor

    from agent.kubelet.transport.http2.connection import ServerConnection

_HEAD: Final = 5  # bytes of a gRPC message: is it compressed, and its length
_PLAIN: Final = {":method": "POST", "te": "trailers"}
_TYPES: Final = {"application/grpc", "application/grpc+proto"}
_ANSWER: Final = ((":status", "200"), ("content-type", "application/grpc+proto"))
_DONE: Final = (("grpc-status", "0"),)

_grpclibs = logging.getLogger("grpclib.server")  # as its own calls do


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
        self._server = cast("grpclib.server.Handler", processor.handler)
        self._calls: dict[int, Call] = {}
        grpclibs = processor.processors
        self._grpclibs: Mapping[type[Event], Any] = dict(grpclibs)
        grpclibs[RequestReceived] = self._begin
        grpclibs[DataReceived] = self._take
        grpclibs[StreamEnded] = self._end
        grpclibs[StreamReset] = self._reset
        grpclibs[WindowUpdated] = grpclibs[RemoteSettingsChanged] = self._widen

    @property
    def _tasks(self) -> dict[Any, asyncio.Task[None]]:
        """The calls under way, grpclib's and ours: it ends them all with the connection, and replaces this now and then."""
        return cast("dict[Any, asyncio.Task[None]]", self._server._tasks)

    def _begin(self, event: RequestReceived) -> None:
        headers = dict(cast("list[tuple[str, str]]", event.headers))
        handler = self._handlers.get(headers[":path"])
        is_plain = all(headers.get(name) == value for name, value in _PLAIN.items()) and "grpc-timeout" not in headers
        if handler is None or not is_plain or headers.get("content-type") not in _TYPES:
            self._grpclibs[RequestReceived](event)
        else:
            self._calls[event.stream_id] = Call(self, event.stream_id, handler)

    def _take(self, event: DataReceived) -> None:
        if (call := self._calls.get(event.stream_id)) is None:
            self._grpclibs[DataReceived](event)
            return
        self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self._start(call, event.data)

    def _end(self, event: StreamEnded) -> None:
        if (call := self._calls.get(event.stream_id)) is None:
            self._grpclibs[StreamEnded](event)
        else:
            self._start(call, b"")

    def _start(self, call: Call, data: bytes) -> None:
        """Start the call, unless it is under way: what comes after its message means nothing."""
        if call in self._tasks:
            return
        call.data = data
        task = self._tasks[call] = asyncio.get_running_loop().create_task(call.run())
        task.add_done_callback(lambda _: self.forget(call))

    def forget(self, call: Call) -> None:
        """Forget a call that has ended."""
        self._tasks.pop(call, None)
        self._calls.pop(call.stream_id, None)

    def _reset(self, event: StreamReset) -> None:
        if (call := self._calls.pop(event.stream_id, None)) is None:
            self._grpclibs[StreamReset](event)
        elif (task := self._tasks.get(call)) is not None:
            task.cancel()

    def _widen(self, event: Event) -> None:
        self._grpclibs[type(event)](event)
        self.room.set()


class Call:
    """One call; a handler has it in the place of grpclib's stream."""

    def __init__(self, calls: UnaryCalls, stream_id: int, handler: Handler) -> None:
        self.stream_id = stream_id
        self.data = b""
        """Its message, with gRPC's head."""
        self._calls, self._handler = calls, handler
        self._is_answered = False

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
        return self._calls.codec.decode(data[_HEAD:end], self._handler.request_type)

    async def send_message(self, message: Any) -> None:
        """Send the reply, once.

        Raises:
            StreamClosedError: the client has ended the call.
        """
        data = self._calls.codec.encode(message, self._handler.reply_type)
        await self._may_write()
        self._calls.http2.send_headers(self.stream_id, _ANSWER)
        self._is_answered = True
        await self._send(b"\0" + len(data).to_bytes(4, "big") + data)

    async def _send(self, data: bytes) -> None:
        http2, room = self._calls.http2, self._calls.room
        while data:
            most = min(http2.local_flow_control_window(self.stream_id), http2.max_outbound_frame_size)
            if most > 0:
                http2.send_data(self.stream_id, data[:most])
                data = data[most:]
                self._calls.connection.flush()
            else:
                room.clear()
                await room.wait()
            await self._may_write()

    async def _may_write(self) -> None:
        """Wait while the client does not read; others write meanwhile.

        Raises:
            StreamClosedError: the client has ended the call.
        """
        if not self._calls.connection.write_ready.is_set():
            await self._calls.connection.write_ready.wait()
        if self.stream_id not in self._calls.http2.streams:
            raise StreamClosedError(self.stream_id)

    async def run(self) -> None:
        """Have the handler answer, and end the call."""
        status, text = Status.UNKNOWN, "Internal Server Error"
        try:
            await self._handler.func(self)
            if self._is_answered:
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
        http2 = self._calls.http2
        if status is Status.OK:
            http2.send_headers(self.stream_id, _DONE, end_stream=True)
        else:
            said = (("grpc-status", str(status.value)), ("grpc-message", encode_grpc_message(text)))
            http2.send_headers(self.stream_id, said if self._is_answered else _ANSWER + said, end_stream=True)
            if self.stream_id in http2.streams:  # it goes on sending what nobody reads
                http2.reset_stream(self.stream_id, ErrorCodes.NO_ERROR)
        self._calls.connection.flush()
