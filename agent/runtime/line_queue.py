"""Writes lines to a stream in a thread: adding a line never waits and never fails.

A pipe that nobody reads blocks its writer once it is full, and journald hangs while its disk does. At most `LINES` wait here;
lines beyond are lost and counted, and their number is logged once there is room again.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

LINES: Final = 4096
"""Lines that wait: what 1,000 devices say when they all fail, four times; 1 MB."""

_LAST_WORDS: Final = 1.0  # seconds that the end of the process waits for the lines that are left
_LOOK_AGAIN: Final = 1.0  # seconds between two looks whether a stream that takes nothing takes something


class QueuedLines:
    """A text stream, as far as a log needs one."""

    def __init__(self, file: int, limit: int = LINES) -> None:
        """Write to this descriptor; `limit` lines may wait."""
        self._file = file
        self._limit = limit
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._untold = 0
        self.lost = 0
        """Lines that were lost, in all."""
        self.when_room: Callable[[int], None] = lambda _lost: None
        """Called by the thread with the number of lines lost since it was called last, once there is room again."""

    def write(self, text: str) -> int:
        """Add a line; it is lost where too many wait."""
        with self._changed:
            if len(self._lines) >= self._limit or (self._thread is None and not self._start()):
                self.lost += 1
                self._untold += 1
            else:
                self._lines.append(text)
                self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread writes each line at once."""

    def isatty(self) -> bool:
        """Is it a terminal?"""
        return os.isatty(self._file)

    def fileno(self) -> int:
        """The descriptor."""
        return self._file

    def close(self, patience: float = _LAST_WORDS) -> None:
        """Wait for the lines that are left, for so many seconds."""
        end = time.monotonic() + patience
        with self._changed:
            while (self._lines or self._busy) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)

    def _start(self) -> bool:
        """Start the thread that writes; False if the system has none to give now, and perhaps has one for the next line."""
        thread = threading.Thread(target=self._serve, name="log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._lines:
                    self._changed.wait()
                text = self._lines.popleft()
                self._busy = True
                lost = self._untold if len(self._lines) * 2 < self._limit else 0
                self._untold -= lost
            self._write(text.encode(errors="replace"))
            if lost:
                self.when_room(lost)

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except BlockingIOError:  # another process that shares the stream made it non-blocking
                select.select([], [self._file], [], _LOOK_AGAIN)
            except OSError:
                self.lost += 1  # a full disk, a closed pipe: there is no other place to report it
                return
