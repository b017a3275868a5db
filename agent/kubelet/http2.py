"""Reads and writes a server's HTTP/2 frames (RFC 9113): the part of `h2.connection.H2Connection` that grpclib's server uses.

h2 holds each frame against the whole RFC, in objects of their own: half of an Allocate's time is its. This knows what a
gRPC client may send, ignores what may be ignored, and ends the connection for anything else. A message goes on when it is
whole: grpclib keeps 400 bytes for each piece, which may be one byte long (as grpc-go did, CVE-2026-84304).

A kubelet sends the same header blocks (RFC 7541) in every call and on every connection: each is read and written once (`Table`,
`header_block`). hpack takes 50 us to read one and 90 us to write the three of a reply, more than Fairlead's own share of an Allocate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from itertools import count
from types import SimpleNamespace
from typing import ClassVar, Final

import msgspec
from h2.connection import ConnectionState
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError, StreamClosedError
from h2.settings import ChangedSetting, SettingCodes
from hpack import Decoder, Encoder, HPACKError
from msgspec import Struct

from agent.runtime.limits import MESSAGE_LIMIT

FRAMES_AT_ONCE: Final = 128
"""Frames that one turn of the event loop reads: asyncio hands over 256 KiB at once, in which there is room for 29,000."""

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH_PROMISE, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = (
    range(10)
)
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED, _PRIORITISED = 0x4, 0x8, 0x20
_HEAD: Final = 9  # bytes
_SIZES: Final = {_PRIORITY: 5, _RST_STREAM: 4, _PING: 8, _WINDOW_UPDATE: 4}
_OF_THE_CONNECTION: Final = {_SETTINGS, _PING, _GOAWAY}
_OF_A_STREAM: Final = {_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _CONTINUATION}

_MOST_FRAME: Final = 16384
_MOST_HEADERS: Final = 16384
"""Bytes of a header block, and of what it says (RFC 9113, 6.5.2, MAX_HEADER_LIST_SIZE): hpack reads those that clients send in
3 ms. It takes 64 KiB by itself. gRPC over HTTP/2 recommends 8 KiB, and a kubelet sends 300 bytes."""

_REMEMBERED: Final = 256
"""Header blocks that are remembered together; more come where each call has another one (`grpc-timeout`)."""

_LONGEST: Final = 1024
"""Bytes of a block that is remembered."""

_EMPTY_TABLE: Final = b"\x20"
"""Says that our table has no entries (RFC 7541, 6.3): begins the block after a client has changed how many it allows."""

_BLOCK_OF_A_FRAME: Final = 256
"""Bytes of a header block that count as another frame: they take as long to read. A kubelet's blocks have 200."""

_MOST_STREAMS: Final = 100
_MOST_WINDOW: Final = 2**31 - 1
_FIRST_WINDOW: Final = 65535
_MOST_SETTINGS: Final = 32
"""Entries of one frame: HTTP/2 knows ten, and nghttp2 takes as many (NGHTTP2_DEFAULT_MAX_SETTINGS)."""

_HEAD_OF_MESSAGE: Final = 5  # bytes: is it compressed, and its length
_MOST_REQUEST: Final = _HEAD_OF_MESSAGE + MESSAGE_LIMIT
"""Bytes of a request, with gRPC's head."""

_WINDOW: Final = 2 * _MOST_REQUEST
"""Bytes that a client may send before they are read, in all streams; one has room for the longest request. Half of them may
have been read without the client being told; such a request fits into the other half."""

_MOST_HELD: Final = 2 * _MOST_REQUEST
"""Bytes of the requests of all open calls of a connection. A kubelet makes one call at a time that has more than a few."""
_MOST_HELD_BY_ALL: Final = 4 * _MOST_REQUEST
"""The same of all connections: what is read of them takes ten times as much."""
_MOST_CALLS_OF_ALL: Final = 1000
"""Calls that may be open on all connections: grpclib and a handler keep 10 kB for each."""
_ALWAYS_CALLS: Final = 5
"""Calls that a connection may have whatever others have: a kubelet has its list and one or two more."""
_ALWAYS: Final = _MOST_FRAME
"""Bytes of a request that are taken whatever others hold: a pod's Allocate has a few hundred."""

_TIMEOUT: Final = "grpc-timeout"
_TIMEOUT_VALUE: Final = re.compile("[0-9]{1,8}[HMSmun]")  # gRPC over HTTP/2, "Timeout"
_SHORT: Final = re.compile("0*[HMS]|[0-9]{0,3}m|[0-9]{0,6}u|[0-9]*n")  # less than a second
_NO_TIMEOUT: Final = "malformed"


def _frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return (len(payload) << 48 | kind << 40 | flags << 32 | stream_id).to_bytes(_HEAD, "big") + payload


def _number(value: int) -> bytes:
    return value.to_bytes(4, "big")


_OUR_SETTINGS: Final = {
    SettingCodes.MAX_CONCURRENT_STREAMS: _MOST_STREAMS,
    SettingCodes.INITIAL_WINDOW_SIZE: _MOST_REQUEST,
    SettingCodes.MAX_HEADER_LIST_SIZE: _MOST_HEADERS,
}
_GREETING: Final = _frame(
    _SETTINGS, 0, 0, b"".join(code.to_bytes(2, "big") + _number(value) for code, value in _OUR_SETTINGS.items())
) + _frame(_WINDOW_UPDATE, 0, 0, _number(_WINDOW - _FIRST_WINDOW))


class ViolationError(ProtocolError):
    """A client broke the protocol: its connection ends."""

    def __init__(self, code: ErrorCodes, why: str) -> None:
        super().__init__(why)
        self.error_code = code


Headers = tuple[tuple[str, str], ...]


class Table:
    """One state of a client's header table. It never changes: a block leads to the next state.

    Clients that have sent the same blocks are in the same state, so connections share their tables.
    """

    __slots__ = ("_blocks", "_decoder", "_remembered")
    _first: ClassVar[Table | None] = None

    def __init__(self, decoder: Decoder, remembered: count[int]) -> None:
        self._decoder = decoder
        self._remembered = remembered  # counts the blocks of all states that followed the same first one
        self._blocks: dict[bytes, tuple[Headers, Table]] = {}

    @classmethod
    def first(cls) -> Table:
        """The state of a new connection."""
        if cls._first is None:
            cls._first = cls(Decoder(_MOST_HEADERS), count())
        return cls._first

    def read(self, block: bytes) -> tuple[Headers, Table]:
        """What a block says, and the state that follows.

        Raises:
            HPACKError: it is no header block, or says more than `_MOST_HEADERS`.
        """
        known = self._blocks.get(block)
        if known is None:
            known = self._read(block)
            if len(block) <= _LONGEST:
                if next(self._remembered) < _REMEMBERED:
                    self._blocks[block] = known
                else:
                    Table._first = None  # new connections begin to remember again; these tables go with theirs
        return known

    def _read(self, block: bytes) -> tuple[Headers, Table]:
        before = self._decoder.header_table
        decoder = Decoder(_MOST_HEADERS)
        decoder.header_table = after = copy(before)
        after.dynamic_entries = copy(before.dynamic_entries)
        # HTTP allows bytes above ASCII in values (RFC 9110, 5.5); grpclib refuses those in which they make no sense
        headers = tuple(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in decoder.decode(block, raw=True)
        )
        if after.dynamic_entries == before.dynamic_entries and after.maxsize == before.maxsize:
            return headers, self
        return headers, Table(decoder, self._remembered)


@lru_cache(64)
def header_block(headers: Headers) -> bytes:
    """A block that says this, and neither needs nor changes the client's table."""
    return Encoder().encode((name, value, True) for name, value in headers)


class OpenCalls:
    """What is held for calls that are open."""

    bytes = 0
    """Of requests."""
    calls = 0


BY_ALL: Final = OpenCalls()
"""By all connections of this process."""


class _Stream(Struct, eq=False):
    """A call, until both sides have ended it; h2's has `closed` and `open`, for which grpclib asks."""

    closed: ClassVar = False
    open: ClassVar = True
    window: int
    """Bytes that we may still send."""
    room: int = _MOST_REQUEST
    """Bytes that the client may still send."""
    read: int = 0
    """Bytes read of which the client has not been told."""
    received: int = 0
    """Bytes that have come."""
    waiting: bytearray = msgspec.field(default_factory=bytearray)
    """Bytes of a message that is not whole."""
    unread: int = 0
    """Bytes of the window that these took, padding among them."""
    has_request: bool = False
    """Whether a whole message has come. No call of ours has two: what follows waits for the end."""
    ended: bool = False
    """By the client."""
    answered: bool = False
    """Ended by us."""


class ServerConnection:
    """A server's side of one connection. Bytes in, h2's events out; `data_to_send` has what goes back.

    The names are those by which grpclib calls h2's.
    """

    def __init__(self, held_by_all: OpenCalls = BY_ALL) -> None:
        self.streams: dict[int, _Stream] = {}
        self._held, self._held_by_all = 0, held_by_all
        self.max_outbound_frame_size = _MOST_FRAME
        self.state_machine = SimpleNamespace(state=ConnectionState.SERVER_OPEN)
        self.frames = 0
        """Frames that have been read, each long header block counted as several."""
        self.is_behind = False
        """Whether there are whole frames that have not been read. `receive_data` reads on."""
        self._out = bytearray(_GREETING)
        self._in = b""  # what has not been read
        self._is_greeted = False
        self._table = Table.first()
        self._prefix = b""  # of the next block that we send
        self._unfinished: tuple[int, int, bytes] | None = None  # stream, flags and begin of a block that continues
        self._newest = 0  # stream
        self._window = _FIRST_WINDOW  # bytes that the client allows: in all
        self._stream_window = _FIRST_WINDOW  # to a new stream
        self._room, self._read = _WINDOW, 0

    # --- what grpclib's streams send ---

    def data_to_send(self) -> bytes | bytearray:
        """What has been written since the last time."""
        out, self._out = self._out, bytearray()
        return out

    def send_headers(self, stream_id: int, headers: Sequence[tuple[str, str]], end_stream: bool = False) -> None:
        """Write headers or trailers."""
        block, self._prefix = self._prefix + header_block(tuple(headers)), b""
        kind, flags = _HEADERS, int(end_stream)
        while len(block) > _MOST_FRAME:  # a long grpc-message
            self._out += _frame(kind, flags, stream_id, block[:_MOST_FRAME])
            kind, flags, block = _CONTINUATION, 0, block[_MOST_FRAME:]
        self._out += _frame(kind, flags | _END_HEADERS, stream_id, block)
        if end_stream:
            stream = self.streams[stream_id]
            stream.answered = True
            if stream.ended:
                self._forget(stream_id)

    def local_flow_control_window(self, stream_id: int) -> int:
        """How many bytes may be sent now.

        Raises:
            StreamClosedError: the stream has ended.
        """
        if (stream := self.streams.get(stream_id)) is None:
            raise StreamClosedError(stream_id)
        return min(self._window, stream.window)

    def send_data(self, stream_id: int, data: bytes, end_stream: bool = False) -> None:
        """Write a piece no larger than the window and a frame allow, as grpclib cuts it."""
        assert not end_stream, "trailers end a stream"
        self._window -= len(data)
        self.streams[stream_id].window -= len(data)
        self._out += _frame(_DATA, 0, stream_id, data)

    def reset_stream(self, stream_id: int, error_code: int = ErrorCodes.NO_ERROR) -> None:
        """End a call at once; grpclib asks first whether it has ended."""
        self._forget(stream_id)
        self._out += _frame(_RST_STREAM, 0, stream_id, _number(error_code))

    def acknowledge_received_data(self, size: int, stream_id: int) -> None:
        """Note what has been read; the client is told once that is half of what it may send."""
        self._read += size
        if self._read >= _WINDOW // 2:
            self._out += _frame(_WINDOW_UPDATE, 0, 0, _number(self._read))
            self._room, self._read = self._room + self._read, 0
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.ended:
            stream.read += size
            if stream.read >= _WINDOW // 2:
                self._out += _frame(_WINDOW_UPDATE, 0, stream_id, _number(stream.read))
                stream.room, stream.read = stream.room + stream.read, 0

    def release(self) -> None:
        """Let go what is held, once the connection is lost."""
        for stream_id in list(self.streams):
            self._forget(stream_id)

    def _forget(self, stream_id: int) -> bool:
        """Let go a call, and what is held for it; False if it had ended."""
        if (stream := self.streams.pop(stream_id, None)) is None:
            return False
        self._held -= stream.received
        self._held_by_all.bytes -= stream.received
        self._held_by_all.calls -= 1
        if stream.unread:
            self.acknowledge_received_data(stream.unread, stream_id)
        return True

    def ping(self, data: bytes) -> None:
        """Ask whether the client is there; grpclib does so every two hours."""
        self._out += _frame(_PING, 0, 0, data)

    def close_connection(self, error_code: int = ErrorCodes.NO_ERROR) -> None:
        """Write a GOAWAY; what comes after it is not read."""
        if self.state_machine.state is not ConnectionState.CLOSED:
            self.state_machine.state = ConnectionState.CLOSED
            self._out += _frame(_GOAWAY, 0, 0, _number(self._newest) + _number(error_code))

    # --- what the client sends ---

    def receive_data(self, data: bytes) -> list[Event]:
        """Read what has come; not more than `FRAMES_AT_ONCE` frames of it.

        Raises:
            ProtocolError: the client broke the protocol.
        """
        events: list[Event] = []
        if self.state_machine.state is ConnectionState.CLOSED:
            return events
        data = self._in + data
        try:
            self._in = data[self._receive_frames(data, events) :]
        except ViolationError as error:
            self.close_connection(error.error_code)
            raise
        return events

    def _receive_frames(self, data: bytes, events: list[Event]) -> int:
        """Take whole frames; returns how many bytes that was."""
        start, size = 0, len(data)
        if not self._is_greeted:
            if data[: len(_PREFACE)] != _PREFACE[:size]:
                raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "no HTTP/2")
            if size < len(_PREFACE):
                return 0
            self._is_greeted, start = True, len(_PREFACE)
        most = self.frames + FRAMES_AT_ONCE
        while size - start >= _HEAD:
            head = int.from_bytes(data[start : start + _HEAD], "big")
            length = head >> 48
            if length > _MOST_FRAME:
                raise ViolationError(ErrorCodes.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
            end = start + _HEAD + length
            if end > size:
                break
            if self.frames >= most:
                self.is_behind = True
                return start
            self.frames += 1
            kind, flags, stream_id = head >> 40 & 0xFF, head >> 32 & 0xFF, head & _MOST_WINDOW  # without a reserved bit
            self._receive(kind, flags, stream_id, data[start + _HEAD : end], events)
            start = end
        self.is_behind = False
        return start

    def _receive(self, kind: int, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        if self._unfinished is not None and kind != _CONTINUATION:
            raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "a frame between those of a header block")
        if len(payload) != _SIZES.get(kind, len(payload)):
            raise ViolationError(ErrorCodes.FRAME_SIZE_ERROR, f"a frame of type {kind} with {len(payload)} bytes")
        if kind in (_OF_THE_CONNECTION if stream_id else _OF_A_STREAM):
            raise ViolationError(ErrorCodes.PROTOCOL_ERROR, f"a frame of type {kind} on stream {stream_id}")
        if kind == _HEADERS:
            block = _content(flags, payload) if flags & (_PADDED | _PRIORITISED) else payload
            self._receive_headers(flags, stream_id, block, events)
        elif kind == _DATA:
            self._receive_data(flags, stream_id, payload, events)
        elif kind == _WINDOW_UPDATE:
            self._receive_window(stream_id, int.from_bytes(payload, "big") & _MOST_WINDOW, events)
        elif kind == _PING and flags & _ACK:
            events.append(PingAckReceived(ping_data=payload))
        elif kind == _PING:
            self._out += _frame(_PING, _ACK, 0, payload)
        elif kind == _SETTINGS:
            self._receive_settings(flags, payload, events)
        elif kind == _RST_STREAM:
            self._receive_reset(stream_id, int.from_bytes(payload, "big"), events)
        elif kind == _CONTINUATION:
            if self._unfinished is None or self._unfinished[0] != stream_id:
                raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "a continuation of nothing")
            _, first, begin = self._unfinished
            self._receive_headers(first & ~_END_HEADERS | flags & _END_HEADERS, stream_id, begin + payload, events)
        elif kind == _GOAWAY:
            if len(payload) < 8:
                raise ViolationError(ErrorCodes.FRAME_SIZE_ERROR, "a GOAWAY without a code")
            terminated = ConnectionTerminated()
            terminated.error_code = int.from_bytes(payload[4:8], "big")
            events.append(terminated)
        elif kind == _PUSH_PROMISE:
            raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "a client that pushes")
        # priorities say nothing to us, and frames of types that we do not know mean nothing (RFC 9113, 5.5)

    def _receive_headers(self, flags: int, stream_id: int, block: bytes, events: list[Event]) -> None:
        if len(block) > _MOST_HEADERS:
            raise ViolationError(ErrorCodes.ENHANCE_YOUR_CALM, f"a header block of {len(block)} bytes and more")
        if not flags & _END_HEADERS:
            self._unfinished = stream_id, flags, block
            return
        self._unfinished = None
        self.frames += len(block) // _BLOCK_OF_A_FRAME
        try:  # also of a stream that has ended: the table follows what was sent
            headers, self._table = self._table.read(block)
        except HPACKError as error:
            raise ViolationError(ErrorCodes.COMPRESSION_ERROR, str(error)) from error
        if stream_id > self._newest:
            self._begin(stream_id, headers, events)
        elif not flags & _END_STREAM:
            raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "headers amid a stream")
        elif (stream := self.streams.get(stream_id)) is not None and stream.ended:
            raise ViolationError(ErrorCodes.STREAM_CLOSED, "headers after a stream's end")
        if flags & _END_STREAM and (stream := self.streams.get(stream_id)) is not None:  # trailers, or there is no data
            self._hand_on(stream_id, stream, events, is_end=True)

    def _begin(self, stream_id: int, headers: Headers, events: list[Event]) -> None:
        if not stream_id & 1:
            raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "a client's stream with an even number")
        self._newest = stream_id
        names = {name for name, _ in headers}
        calls = len(self.streams)
        if calls >= _MOST_STREAMS or (calls >= _ALWAYS_CALLS and self._held_by_all.calls >= _MOST_CALLS_OF_ALL):
            self._out += _frame(_RST_STREAM, 0, stream_id, _number(ErrorCodes.REFUSED_STREAM))
        elif ":method" not in names or ":path" not in names:  # grpclib takes them for granted
            self._out += _frame(_RST_STREAM, 0, stream_id, _number(ErrorCodes.PROTOCOL_ERROR))
        else:
            if _TIMEOUT in names:
                headers = tuple((name, _timeout(value) if name == _TIMEOUT else value) for name, value in headers)
            self.streams[stream_id] = _Stream(self._stream_window)
            self._held_by_all.calls += 1
            # grpclib has h2 decode headers into text, which h2's types do not say
            events.append(RequestReceived(stream_id=stream_id, headers=headers))  # type: ignore[arg-type]

    def _receive_data(self, flags: int, stream_id: int, payload: bytes, events: list[Event]) -> None:
        size = len(payload)
        data = _content(flags & _PADDED, payload) if flags & _PADDED else payload
        self._room -= size
        if self._room < 0:
            raise ViolationError(ErrorCodes.FLOW_CONTROL_ERROR, "more data than allowed")
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self._newest:
                raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "data of no stream")
            # the client sent it before it read that we ended the stream
            self.acknowledge_received_data(size, stream_id)
            return
        stream.room -= size
        if stream.ended:
            raise ViolationError(ErrorCodes.STREAM_CLOSED, "data after a stream's end")
        if stream.room < 0:
            raise ViolationError(ErrorCodes.FLOW_CONTROL_ERROR, "more data than allowed")
        stream.received += len(data)
        self._held += len(data)
        self._held_by_all.bytes += len(data)
        stream.waiting += data
        stream.unread += size
        begins = not stream.has_request and len(stream.waiting) >= _HEAD_OF_MESSAGE
        announced = int.from_bytes(stream.waiting[1:_HEAD_OF_MESSAGE], "big") if begins else 0
        is_full = (
            self._held > _MOST_HELD or self._held_by_all.bytes > _MOST_HELD_BY_ALL
        )  # small calls are taken all the same
        if announced > MESSAGE_LIMIT or stream.received > _MOST_REQUEST or (is_full and stream.received > _ALWAYS):
            self.reset_stream(stream_id, ErrorCodes.ENHANCE_YOUR_CALM)
            self._tell_reset(StreamReset(stream_id=stream_id, remote_reset=False), events)
            return
        if flags & _END_STREAM or (begins and len(stream.waiting) >= _HEAD_OF_MESSAGE + announced):
            self._hand_on(stream_id, stream, events, is_end=bool(flags & _END_STREAM))

    def _hand_on(self, stream_id: int, stream: _Stream, events: list[Event], *, is_end: bool) -> None:
        """Hand on what has come of a message, and that the client has sent all."""
        if stream.unread:  # grpclib takes a piece of nothing for the end
            data, size = bytes(stream.waiting), stream.unread
            events.append(DataReceived(stream_id=stream_id, data=data, flow_controlled_length=size))
            stream.waiting, stream.unread, stream.has_request = bytearray(), 0, True
        if is_end:
            stream.ended = True
            events.append(StreamEnded(stream_id=stream_id))
            if stream.answered:
                self._forget(stream_id)

    def _receive_window(self, stream_id: int, more: int, events: list[Event]) -> None:
        if not more:
            raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "a window that grows by nothing")
        if stream_id > self._newest:
            raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "a window of no stream")
        if not stream_id:
            self._window = window = self._window + more
        elif (stream := self.streams.get(stream_id)) is not None:
            stream.window = window = stream.window + more
        else:
            return
        if window > _MOST_WINDOW:
            raise ViolationError(ErrorCodes.FLOW_CONTROL_ERROR, "too large a window")
        events.append(WindowUpdated(stream_id=stream_id))

    def _receive_settings(self, flags: int, payload: bytes, events: list[Event]) -> None:
        if len(payload) % 6 or (flags & _ACK and payload):
            raise ViolationError(ErrorCodes.FRAME_SIZE_ERROR, f"settings of {len(payload)} bytes")
        if flags & _ACK:
            return
        if len(payload) > _MOST_SETTINGS * 6:
            raise ViolationError(ErrorCodes.ENHANCE_YOUR_CALM, f"{len(payload) // 6} settings in one frame")
        # the last of several counts (RFC 9113, 6.5.3): each first window changes those of all streams
        settings = {payload[at : at + 2]: payload[at + 2 : at + 6] for at in range(0, len(payload), 6)}
        for code, value in ((int.from_bytes(it, "big"), int.from_bytes(what, "big")) for it, what in settings.items()):
            if code == SettingCodes.INITIAL_WINDOW_SIZE:
                for stream in self.streams.values():
                    stream.window += value - self._stream_window
                self._stream_window = value
                if max(value, *(stream.window for stream in self.streams.values()), 0) > _MOST_WINDOW:
                    raise ViolationError(ErrorCodes.FLOW_CONTROL_ERROR, "too large a window")
                changed = RemoteSettingsChanged()
                changed.changed_settings[code] = ChangedSetting(code, None, value)
                events.append(changed)
            elif code == SettingCodes.MAX_FRAME_SIZE:
                if not _MOST_FRAME <= value < 1 << 24:
                    raise ViolationError(ErrorCodes.PROTOCOL_ERROR, f"frames of at most {value} bytes")
                self.max_outbound_frame_size = value
            elif code == SettingCodes.HEADER_TABLE_SIZE:
                self._prefix = _EMPTY_TABLE
        self._out += _frame(_SETTINGS, _ACK, 0)

    def _receive_reset(self, stream_id: int, code: int, events: list[Event]) -> None:
        if stream_id > self._newest:
            raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "a reset of no stream")
        if self._forget(stream_id):
            self._tell_reset(StreamReset(stream_id=stream_id, error_code=code, remote_reset=True), events)

    def _tell_reset(self, reset: StreamReset, events: list[Event]) -> None:
        """Hand on that a call was reset; hand on nothing of a call that began in the same read.

        grpclib would cancel that call's task before its first step, and keep the stream as long as the connection lasts
        (4,000 streams of 9 kB in a second of the resets of CVE-2023-44487).
        """
        call = [event for event in events if getattr(event, "stream_id", 0) == reset.stream_id]
        if not any(isinstance(event, RequestReceived) for event in call):
            events.append(reset)
            return
        events[:] = [event for event in events if getattr(event, "stream_id", 0) != reset.stream_id]
        for event in call:
            if isinstance(event, DataReceived):
                self.acknowledge_received_data(event.flow_controlled_length, reset.stream_id)


def _timeout(value: str) -> str:
    """A call's time as grpclib can take it.

    It fails, with a traceback, on times that no number holds, and on one that is over before the call begins. Clients end
    their calls themselves; ours ends only what no caller waits for.
    """
    if not _TIMEOUT_VALUE.fullmatch(value):
        return _NO_TIMEOUT
    return "1S" if _SHORT.fullmatch(value) else value


def _content(flags: int, payload: bytes) -> bytes:
    """The payload without its padding, and without the bytes of a priority."""
    start = padding = 0
    if flags & _PADDED:
        if not payload:
            raise ViolationError(ErrorCodes.FRAME_SIZE_ERROR, "a padded frame without its padding's length")
        start, padding = 1, payload[0]
    if flags & _PRIORITISED:
        start += 5
    if len(payload) < start + padding:
        raise ViolationError(ErrorCodes.PROTOCOL_ERROR, "more padding than frame")
    return payload[start : len(payload) - padding]
