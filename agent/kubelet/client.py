"""Calls what listens on a unix socket, a kubelet or another agent, and bounds what may come back.

grpclib writes every HTTP/2 frame by itself: an Allocate reply is three writes, a list of 10,000 devices twenty. Each is a system
call and wakes the other side, which can do nothing with a part. `GatheringTransport` sends what one turn of the event loop writes
in one piece, here and in `server.py`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import socket
import termios
from pathlib import Path
from typing import Any, Final, TypeVar

import grpclib.client
from grpclib.client import UnaryUnaryMethod
from grpclib.protocol import H2Protocol
from h2.events import AlternativeServiceAvailable, Event, UnknownFrameReceived
from msgspec import Struct

from agent.kubelet.wire import Codec, Encoded
from agent.runtime.limits import MESSAGE_LIMIT

_MOST_FRAMES: Final = 4096
"""Of one connection: as many of 4 KiB as 16 MiB are; each takes h2 some 20 us."""

_GATHERED_AT_MOST: Final = 64 << 10
"""Gathered before they are sent all the same: asyncio's high-water mark, so that a client that does not read still
stops the sender where it would have without us."""

_HEAD_BYTES: Final = 9  # of a frame: length (3), type, flags, stream

T = TypeVar("T")


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
        if len(self._gathered) >= _GATHERED_AT_MOST:
            self._send()

    def _send(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        if gathered and not self._transport.is_closing():
            self._transport.write(gathered)

    def is_unread(self) -> bool:
        """Whether the other side has yet to read what was written. SIOCOUTQ tells (unix_outq_len, net/unix/af_unix.c)."""
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
        """Whether it is closed or about to be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the socket."""
        return self._transport.get_extra_info(name, default)


class Channel(grpclib.client.Channel):
    """A channel to the socket at `path`; it is closed where the other side sends more than an answer may have."""

    def __init__(self, path: str, most_bytes: float = MESSAGE_LIMIT, most_frames: float = _MOST_FRAMES) -> None:
        """Prepare; a connection that is to last may bring any number of both (math.inf)."""
        super().__init__(path=path, codec=Codec())
        self.most_bytes, self.most_frames = most_bytes, most_frames
        self.excess = ""
        """What the other side sent too much of: `more than 16 MiB`; empty if nothing."""

    def _protocol_factory(self) -> H2Protocol:
        return _Connection(super()._protocol_factory(), self)

    async def call(self, method: str, request: Encoded, answer: type[T], timeout: float | None = None) -> T:  # noqa: ASYNC109  # of the call, told to the other side
        """Call a method that has one request and one answer; `timeout` is in seconds.

        The call is made in a task of its own. Where the connection is lost or the time is up, grpclib cancels the task that
        waits, turns that into an error, and never takes it back (`Task.uncancel`): every scope that this task is in would
        from then on take it for cancelled from outside, and not catch its own next cancellation.

        Raises:
            Exception: whatever grpclib raises.
        """
        call = UnaryUnaryMethod[Encoded, T](self, method, Encoded, answer)
        return await asyncio.ensure_future(call(request, timeout=timeout))


def listens(path: Path) -> bool:
    """Whether a process accepts connections there now. One that has ended may have left its socket behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as tried:
        try:
            return tried.connect_ex(str(path)) in (0, errno.EAGAIN)  # EAGAIN: it is busy
        except OSError:  # a path that is longer than any socket's
            return False


class FrameCounter(Struct):
    """Counts the frames that a connection brings, wherever reads have cut them."""

    head: bytes = b""
    """Of the frame that is coming."""
    rest: int = 0
    """Bytes before the next frame's head."""

    def count(self, data: bytes) -> int:
        """The number of frames whose heads end in this piece."""
        frames, at, size = 0, self.rest, len(data) + len(self.head)
        data = self.head + data
        while at + _HEAD_BYTES <= size:
            at += _HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
            frames += 1
        self.head, self.rest = data[at:], max(0, at - size)
        return frames


class _Connection(H2Protocol):
    """A connection of a channel."""

    def __init__(self, prepared: H2Protocol, channel: Channel) -> None:
        super().__init__(prepared.handler, prepared.config, prepared.h2_config)
        self._channel = channel
        self._counter = FrameCounter()
        self._bytes, self._frames = 0, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = GatheringTransport(transport)
        super().connection_made(self._transport)
        for event in (UnknownFrameReceived, AlternativeServiceAvailable):  # grpclib ends the connection on these
            self.processor.processors[event] = _ignore

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        self._frames += self._counter.count(data)
        if self._bytes > self._channel.most_bytes:
            self._channel.excess = f"more than {int(self._channel.most_bytes) >> 20} MiB"
        elif self._frames > self._channel.most_frames:
            self._channel.excess = f"more than {self._channel.most_frames:,} frames"
        else:
            super().data_received(data)
            return
        self._transport.abort()


def _ignore(_: Event) -> None:
    """Frames of types that we do not know mean nothing to us (RFC 9113, 5.5)."""
