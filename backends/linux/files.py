"""Reads files that others write: never longer than they can be, and no FIFO or device that would make a reader wait.

The kernel's own files in /sys and /proc are read elsewhere (`sysfs`): nobody else can write there.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_CHUNK: Final = 1 << 20  # bytes of one read
_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


@contextmanager
def opened(path: Path, *, follow: bool) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file, open for reading, and what it is; a symbolic link at its place is followed only where that is said.

    Raises:
        OSError: it cannot be opened, or is something else; the reason is in words.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise OSError(errno.ELOOP, "It is a symbolic link", str(path)) from error
        if error.errno == errno.ENXIO:  # as a socket answers
            raise OSError(errno.EINVAL, "It is no regular file", str(path)) from error
        raise
    try:
        found = os.fstat(file)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
            raise OSError(errno.EINVAL, f"It is {kind}, not a regular file", str(path))
        yield file, found
    finally:
        os.close(file)


def read(path: Path, most: int, *, follow: bool = True) -> bytes:
    """All that is in a regular file.

    Raises:
        OSError: as `opened`, or it is longer than `most` bytes.
    """
    with opened(path, follow=follow) as (file, _):
        return contents(file, most, path)


def contents(file: int, most: int, path: Path) -> bytes:
    """All that is in an open file.

    Raises:
        OSError: it cannot be read, or is longer than `most` bytes.
    """
    data = bytearray()
    while part := os.read(file, min(_CHUNK, most + 1 - len(data))):
        data += part
        if len(data) > most:
            raise OSError(errno.EFBIG, f"It has more than {most} bytes", str(path))
    return bytes(data)
