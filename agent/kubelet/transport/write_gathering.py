"""Sends what one turn of the event loop writes in one piece.

grpclib writes every HTTP/2 frame by itself: an Allocate reply is three writes, a list of 10,000 devices twenty.
Each is a system call and wakes the other side, which can do nothing with a part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from grpclib.client import Channel
from grpclib.encoding.base import CodecBase
from grpclib.protocol import H2Protocol
from h2.events import AlternativeServiceAvailable, Event, UnknownFrameReceived

from agent.kubelet.transport.flood import FrameCutter
from agent.runtime.limits import MESSAGE_LIMIT

_MOST_FRAMES: Final = 4096
"""Of one connection to a kubelet: as many of 4 KiB as 16 MiB are; each takes h2 some 20 us."""

_MOST_BYTES: Final = 64 << 10
"""Gathered before they are sent all the same: asyncio's high-water mark, so that a client that does not read still
stops the sender where it would have without us."""


class GatheringTransport(asyncio.Transport):
    """A transport in front of another, whose protocol is told of pauses as before."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._written = bytearray()
        self.on_write: Callable[[int], None] = lambda _: None
        """Told how many bytes are written."""

    def pause_reading(self) -> None:
        """Leave what comes with the kernel."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Have this sent at the end of this turn."""
        if not self._written:
            self._loop.call_soon(self._send)
        self._written += data
        self.on_write(len(data))
        if len(self._written) >= _MOST_BYTES:
            self._send()

    def _send(self) -> None:
        written, self._written = self._written, bytearray()
        if written and not self._transport.is_closing():
            self._transport.write(written)

    def close(self) -> None:
        """Send what was written, then close."""
        self._send()
        self._transport.close()

    def abort(self) -> None:
        """Close at once, sending nothing."""
        self._written = bytearray()
        self._transport.abort()

    def is_closing(self) -> bool:
        """Is it closed or about to be?"""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What is known of the socket."""
        return self._transport.get_extra_info(name, default)


class GatheringProtocol(H2Protocol):
    """A connection, made from one that grpclib prepared, that sends so."""

    transport: GatheringTransport
    """What it sends by; grpclib forgets its own when it closes."""

    def __init__(self, prepared: H2Protocol) -> None:
        super().__init__(prepared.handler, prepared.config, prepared.h2_config)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = GatheringTransport(transport)
        super().connection_made(self.transport)
        for event in (UnknownFrameReceived, AlternativeServiceAvailable):  # grpclib ends the connection on these
            self.processor.processors[event] = _ignore


def _ignore(_: Event) -> None:
    """Frames of types that we do not know mean nothing to us (RFC 9113, 5.5)."""


class GatheringChannel(Channel):
    """A client's channel with such a connection, which ends where the other side sends more than can be an answer."""

    def __init__(self, *, path: str, codec: CodecBase | None = None, most_bytes: int = MESSAGE_LIMIT) -> None:
        """To the socket at this path; so many bytes may come."""
        super().__init__(path=path, codec=codec)
        self._most_bytes = most_bytes
        self.excess = ""
        """What came too much of, in words: `more than 16 MiB`; empty if nothing did."""

    def _protocol_factory(self) -> H2Protocol:
        return _BoundedProtocol(super()._protocol_factory(), self._most_bytes, self._exceeded)

    def _exceeded(self, what: str) -> None:
        self.excess = what


class _BoundedProtocol(GatheringProtocol):
    """One that is reset when more has come than may."""

    def __init__(self, prepared: H2Protocol, most_bytes: int, exceeded: Callable[[str], None]) -> None:
        super().__init__(prepared)
        self._cutter = FrameCutter(preface=0)
        self._bytes, self._frames = 0, 0
        self._most_bytes = most_bytes
        self._exceeded = exceeded

    def data_received(self, data: bytes) -> None:
        """Read what is not too much."""
        self._bytes += len(data)
        if self._bytes > self._most_bytes:
            self._end(f"more than {self._most_bytes >> 20} MiB")
            return
        for piece, frames in self._cutter.cut(data):
            self._frames += frames
            if self._frames > _MOST_FRAMES:
                self._end(f"more than {_MOST_FRAMES:,} frames")
            if self.transport.is_closing():  # by us, or by h2 because a frame makes no sense
                return
            super().data_received(piece)

    def _end(self, why: str) -> None:
        self._exceeded(why)
        self.transport.abort()
