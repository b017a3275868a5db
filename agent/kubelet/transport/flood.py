"""What one client may send: so many HTTP/2 frames in one turn of the event loop, and so many in all.

h2 takes some 20 us for a frame, however small; asyncio hands over 256 KiB at once, in which there is room for 29,000 of them.
A kubelet sends a few frames for each call, and window updates for what it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

PREFACE_BYTES: Final = 24
"""What a client's connection begins with (RFC 9113, 3.4)."""

PER_TURN: Final = 128
"""Frames that are read in one turn of the event loop."""

_HEAD_BYTES: Final = 9  # of a frame: length (3), type, flags, stream
_BURST: Final = 10_000.0  # frames
_PER_SECOND: Final = 1_000.0
_BYTES_FOR_FRAME: Final = 1024  # that we sent: for these a client may send a frame more, a window update perhaps


class FrameCutter:
    """Cuts what a connection brings into pieces of so many frames, wherever reads have cut it."""

    def __init__(self, preface: int = PREFACE_BYTES) -> None:
        self._rest = preface  # bytes before the next frame's head
        self._head = bytearray()

    def cut(self, data: bytes, most: int = PER_TURN) -> Iterator[tuple[bytes, int]]:
        """The pieces, each with the number of frames that begin in it."""
        start = at = frames = 0
        while at < len(data):
            if self._rest:
                step = min(self._rest, len(data) - at)
                self._rest -= step
                at += step
                continue
            part = data[at : at + _HEAD_BYTES - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) == _HEAD_BYTES:
                self._rest = int.from_bytes(self._head[:3], "big")
                self._head.clear()
                frames += 1
                if frames == most:
                    yield data[start:at], frames
                    start, frames = at, 0
        if start < len(data):
            yield data[start:], frames


class Allowance:
    """How many frames a client may still send; what it leaves is made up for by time, and by what it is sent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left, self._at = _BURST, clock()

    def sent(self, size: int) -> None:
        """So many bytes go to the client."""
        self._left += size / _BYTES_FOR_FRAME

    def take(self, frames: int) -> bool:
        """So many frames have come; False if that is too many."""
        now = self._clock()
        earned, self._at = (now - self._at) * _PER_SECOND, now
        self._left = max(self._left, min(self._left + earned, _BURST)) - frames
        return self._left >= 0
