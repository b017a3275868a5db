"""Sends what one turn of the event loop writes in one piece.

grpclib writes every HTTP/2 frame by itself: an Allocate reply is three writes, a list of 10,000 devices twenty.
Each is a system call and wakes the other side, which can do nothing with a part.
"""

from __future__ import annotations

import asyncio
import fcntl
import termios
from typing import Any, Final

_MOST_BYTES: Final = 64 << 10
"""Gathered before they are sent all the same: asyncio's high-water mark, so that a client that does not read still
stops the sender where it would have without us."""


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
