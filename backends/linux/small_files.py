"""Reads small files in a directory that is opened once, which takes half as long as to read them by whole paths.

Used for what is read every few seconds of every device. `sysfs`, which follows no link, reads the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from backends.errors import not_short
from backends.linux.sysfs import ATTRIBUTE_BYTES

_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in a fixture tree must not block us

_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A directory, open for reading files in it; the kernel follows links to it.

    Raises:
        OSError: there is none, or it may not be entered.
    """
    directory = _open(path, _DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)


def read(directory: int, name: str) -> bytes:
    """The content of a small file, without the white space around it.

    Raises:
        OSError: it cannot be read.
    """
    file = open_file(directory, name)
    try:
        return os.read(file, ATTRIBUTE_BYTES).strip()
    finally:
        os.close(file)


def open_file(directory: int, name: str) -> int:
    """Open a small file for reading.

    Raises:
        OSError: it cannot be opened.
    """
    return _open(name, _FLAGS, directory)


def _open(path: str, flags: int, directory: int | None = None) -> int:
    try:
        return os.open(path, flags, dir_fd=directory)
    except OSError as error:
        raise not_short(error) from None


def text(directory: int, name: str) -> bytes | None:
    """As `read`; None if it cannot be read."""
    try:
        return read(directory, name)
    except OSError:
        return None
