"""One client's connection to a server of ours: our HTTP/2 beneath grpclib, and a bound on the frames that the client may send.

A kubelet sends a few frames for each call, and window updates for what it reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

import grpclib.protocol
from grpclib.protocol import EventsProcessor, H2Protocol
from h2.events import PingAckReceived

from agent.kubelet.transport.gathered_writes import GatheringTransport
from agent.kubelet.transport.http2.connection import ServerConnection
from agent.kubelet.transport.unary_calls import UnaryCalls

if TYPE_CHECKING:
    from h2.connection import H2Connection

    from agent.kubelet.transport.server import SocketServer

_BURST: Final = 10_000.0  # frames
_PER_SECOND: Final = 1_000.0  # frames
_BYTES_FOR_FRAME: Final = 1024  # that we sent: for these a client may send a frame more, a window update perhaps


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
