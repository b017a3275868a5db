"""Reads files that others write: never longer than they can be, and no FIFO or device that would block the reader.

Writes our files in directories where others may write: never through a link of theirs. `sysfs` reads /sys and /proc, where
only the kernel writes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_CHUNK: Final = 1 << 20  # bytes of one read
_FRESH: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


@contextmanager
def opened(path: Path, *, follow: bool) -> Iterator[tuple[int, os.stat_result]]:
    """A regular file, open for reading, and its status; `follow`: whether a symbolic link in its place is followed.

    Raises:
        OSError: it cannot be opened, or is something else; the reason is in words.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    file, found = _open(path, flags)
    try:
        yield file, found
    finally:
        os.close(file)


def open_ours(path: Path) -> int:
    """A regular file of ours, open for reading and writing; it is made if it is missing.

    Raises:
        OSError: it cannot be opened or made, or is something else: a symbolic link, or another file by a hard link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    file, found = _open(path, flags)
    if found.st_nlink > 1:
        os.close(file)
        raise OSError(errno.EMLINK, "It has other names, too", str(path))
    return file


def _open(path: Path, flags: int) -> tuple[int, os.stat_result]:
    try:
        file = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
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
    except BaseException:
        os.close(file)
        raise
    return file, found


def unfinished(path: Path) -> Path:
    """The file that `replace` writes before it renames it."""
    return path.with_name(f".{path.name}.new")


def replace(path: Path, data: bytes, mode: int = 0o600, *, synced: bool = False) -> None:
    """Write a file of ours in place of what is there. A write that was cut off leaves one `.<name>.new` at most.

    With `synced` the data and the name are on the disk when this returns.

    Raises:
        OSError: what was there before is there still, or the name may not be on the disk yet.
    """
    fresh = unfinished(path)
    try:
        file = os.open(fresh, _FRESH, mode)
    except FileExistsError:
        fresh.unlink()
        file = os.open(fresh, _FRESH, mode)
    try:
        try:
            os.fchmod(file, mode)  # independent of the umask
            while data:
                data = data[os.write(file, data) :]
            if synced:
                os.fsync(file)
        finally:
            os.close(file)
        fresh.rename(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink()  # a full disk is no place to leave half a file
        raise
    if synced:
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read(path: Path, most: int, *, follow: bool = True) -> bytes:
    """The whole content of a regular file.

    Raises:
        OSError: as `opened`, or it is longer than `most` bytes.
    """
    with opened(path, follow=follow) as (file, _):
        return contents(file, most, path)


def contents(file: int, most: int, path: Path) -> bytes:
    """The whole content of an open file.

    Raises:
        OSError: it cannot be read, or is longer than `most` bytes.
    """
    data = bytearray()
    while part := os.read(file, min(_CHUNK, most + 1 - len(data))):
        data += part
        if len(data) > most:
            raise OSError(errno.EFBIG, f"It has more than {most} bytes", str(path))
    return bytes(data)
