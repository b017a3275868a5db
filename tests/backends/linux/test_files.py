from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from backends.linux import files


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"data")
    path.symlink_to(target)


def dangling(path: Path) -> None:
    path.symlink_to("/nowhere/at/all")


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize(
    ("make", "follow", "reason"),
    [
        (fifo, True, "It is a FIFO, not a regular file"),
        (fifo, False, "It is a FIFO, not a regular file"),
        (zeros, True, "It is a character device, not a regular file"),
        (zeros, False, "It is a symbolic link"),
        (link, False, "It is a symbolic link"),
        (dangling, False, "It is a symbolic link"),
        (dangling, True, "No such file or directory"),
        (bound, True, "It is no regular file"),
        (Path.mkdir, True, "Is a directory"),
        (lambda path: path.write_bytes(bytes(17)), True, "It has more than 16 bytes"),
        (lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40), True, "It has more than 16 bytes"),
    ],
)
def test_what_is_no_short_regular_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], object], follow: bool, reason: str
) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=re.escape(reason)) as raised:
        files.read(tmp_path / "file", 16, follow=follow)
    assert raised.value.filename == str(tmp_path / "file") or raised.value.errno == errno.ENOENT


@pytest.mark.parametrize("size", [0, 1, 16, (1 << 20) - 1, 1 << 20, (3 << 20) + 1])
def test_a_file_is_read_whole(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "link").symlink_to("file")
    assert files.read(tmp_path / "file", max(size, 16), follow=False) == data
    assert files.read(tmp_path / "link", size) == data


def test_a_file_of_the_kernels_that_says_no_size_is_read(tmp_path: Path) -> None:
    assert b"Name:" in files.read(Path("/proc/self/status"), 1 << 16)
