"""Asks the kernel to watch directories, by the C library that Python itself runs on; lists those that it does not watch.

inotify_simple looks for that with ldconfig, and for this imports 14 modules more: 4 ms of a start.
"""

from __future__ import annotations

import ctypes
import enum
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
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
_READ_BYTES: Final = 16 << 10  # some 300 events between two turns of the event loop: 2 ms
_EVENT_BYTES: Final = _HEAD.size + 256  # of the one with the longest name, NAME_MAX

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

    def read(self) -> tuple[list[tuple[int, int, str]], bool]:
        """Descriptor, mask and name of each event that waits, as many as fit in one read; and whether more may wait."""
        data, events, at = os.read(self._fd, _READ_BYTES), [], 0
        while at < len(data):
            wd, mask, _, size = _HEAD.unpack_from(data, at)
            at += _HEAD.size + size
            events.append((wd, mask, os.fsdecode(data[at - size : at].rstrip(b"\0"))))
        return events, len(data) > _READ_BYTES - _EVENT_BYTES


def _checked(result: int) -> int:
    if result == -1:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return result


# --- where it does not watch ---

Entries = Mapping[str, tuple[int, int]] | None
"""Name → inode and time of the last change in ns; None: there is no such directory."""


class Change(enum.Enum):
    """What happened to an entry, or to a watched directory itself."""

    CREATED = "created"  # it appeared under this name: made, or renamed to it (perhaps over another)
    REMOVED = "removed"  # nothing has this name any more, or had for a moment
    CHANGED = "changed"  # its owner, permissions or links changed, or a writer closed it


def entries_of(directory: Path) -> Entries:
    """The entries as they are now, links as themselves."""
    found = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                with suppress(OSError):  # it vanished in this moment
                    status = entry.stat(follow_symlinks=False)
                    found[entry.name] = status.st_ino, status.st_ctime_ns
    except OSError:
        return None
    return found


def differences(before: Entries, now: Entries) -> Iterator[tuple[str, Change]]:
    """Each name whose entry differs, and what happened to it; an empty name for the directory itself."""
    if now is None:
        if before is not None:
            yield "", Change.REMOVED
        return
    if before is None:
        yield "", Change.CREATED
        before = {}
    yield from ((name, Change.REMOVED) for name in sorted(before.keys() - now.keys()))
    for name, (inode, changed) in now.items():
        if name not in before or before[name][0] != inode:
            yield name, Change.CREATED
        elif before[name][1] != changed:
            yield name, Change.CHANGED
