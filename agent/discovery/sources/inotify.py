"""Asks the kernel to watch directories, by the C library that Python itself runs on.

inotify_simple looks for that with ldconfig, and for this imports 14 modules more: 4 ms of a start.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from typing import Final

ATTRIB: Final = 0x4  # linux/inotify.h
CLOSE_WRITE: Final = 0x8
MOVED_FROM: Final = 0x40
MOVED_TO: Final = 0x80
CREATE: Final = 0x100
DELETE: Final = 0x200
Q_OVERFLOW: Final = 0x4000
IGNORED: Final = 0x8000
ONLYDIR: Final = 0x0100_0000
MASK_ADD: Final = 0x2000_0000

_HEAD: Final = struct.Struct("iIII")  # struct inotify_event: wd, mask, cookie, len; the name follows
EVENT_BYTES: Final = _HEAD.size + 256
"""Of the one with the longest name, NAME_MAX."""

_C: Final = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """One instance; its methods raise OSError as the system calls fail (inotify(7))."""

    def __init__(self) -> None:
        self._fd = _checked(_C.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def fileno(self) -> int:
        """Its descriptor, to read events from; it does not block."""
        return self._fd

    def close(self) -> None:
        """Watch nothing any more."""
        os.close(self._fd)

    def add_watch(self, path: str, mask: int) -> int:
        """Watch this; the watch's descriptor."""
        return _checked(_C.inotify_add_watch(self._fd, os.fsencode(path), mask))

    def rm_watch(self, wd: int) -> None:
        """Watch it no more."""
        _checked(_C.inotify_rm_watch(self._fd, wd))


def events(data: bytes) -> Iterator[tuple[int, int, str]]:
    """Descriptor, mask and name of each event."""
    at = 0
    while at < len(data):
        wd, mask, _, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size + size
        yield wd, mask, os.fsdecode(data[at - size : at].rstrip(b"\0"))


def _checked(result: int) -> int:
    if result == -1:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return result
