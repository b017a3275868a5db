"""Device nodes below a test's directory: the kernel's, or files that pretend to be nodes where none may be made.

An ordinary user and root of many containers may make no device node. There `make_node` makes a plain file with a mark,
and `pretend` has this process take each file with the mark for a device node with the numbers it was made with.
"""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

PRELUDE: Final = "from tests import nodes\nnodes.pretend()\n"
"""For a process of its own, whose working directory is the repository."""

_PRETENDS: Final = stat.S_IFREG | stat.S_ISVTX  # nobody else gives a plain file the sticky bit
_BLOCK: Final = 1 << 40  # above any device number; both are kept as the file's mtime in nanoseconds


def make_node(path: Path, kind: str, major: int, minor: int, mode: int = 0o600) -> None:
    """A device node that appears at once with all it has, `kind` being c or b."""
    number = os.makedev(major, minor)
    if can_make_nodes():
        os.mknod(path, mode | (stat.S_IFBLK if kind == "b" else stat.S_IFCHR), number)
        return
    file = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY, mode)
    try:
        os.fchmod(file, mode | stat.S_ISVTX)
        os.utime(file, ns=(0, number | (_BLOCK if kind == "b" else 0)))
        os.link(f"/proc/self/fd/{file}", path, src_dir_fd=file)  # or the link itself would be linked
    finally:
        os.close(file)


@functools.cache
def can_make_nodes() -> bool:
    """Whether this process may make real ones, and read what they are."""
    with tempfile.TemporaryDirectory() as place:
        try:
            os.mknod(f"{place}/node", 0o600 | stat.S_IFCHR, os.makedev(240, 1))
        except OSError:
            return False
        return True


@functools.cache
def pretend() -> None:
    """From now on, this process takes such files for device nodes; where it can make real ones, nothing changes."""
    if can_make_nodes():
        return
    for name in ("stat", "lstat", "fstat"):
        ask = getattr(os, name)
        seeing = _seeing(ask)
        setattr(os, name, seeing)
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if ask in able:
                able.add(seeing)
    for name in ("chmod", "fchmod"):
        change = getattr(os, name)
        keeping = _keeping_the_mark(change)
        setattr(os, name, keeping)
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
            if change in able:
                able.add(keeping)


def _keeping_the_mark(change: Callable[..., None]) -> Callable[..., None]:
    """A chmod that leaves a file that pretends to be a node one."""
    asked = getattr(os.stat, "__wrapped__", os.stat)  # what the file is itself

    @functools.wraps(change)
    def keeping(file: Any, mode: int, **options: Any) -> None:
        found = asked(file, **options)
        marked = found.st_mode & ~0o777 == _PRETENDS
        change(file, mode | stat.S_ISVTX if marked else mode, **options)

    return keeping


def _seeing(ask: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
    @functools.wraps(ask)
    def seeing(*arguments: Any, **options: Any) -> os.stat_result:
        found = ask(*arguments, **options)
        return _node(found) if found.st_mode & ~0o777 == _PRETENDS else found

    return seeing


def _node(found: os.stat_result) -> os.stat_result:
    fields: tuple[int, ...]
    more: dict[str, int]
    fields, more = cast(Any, found.__reduce__()[1])
    number = found.st_mtime_ns
    kind = stat.S_IFBLK if number & _BLOCK else stat.S_IFCHR
    return os.stat_result(
        (kind | stat.S_IMODE(found.st_mode) & 0o777, *fields[1:]), more | {"st_rdev": number & ~_BLOCK}
    )
