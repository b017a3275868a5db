"""One agent at a time on a plugin directory: a second one waits until the first is gone."""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from agent.kubelet.transport.client import listens
from backends.linux import files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_RETRY: Final = 0.1  # seconds; a flock cannot be waited for on an event loop


class Lock(Struct, frozen=True):
    """A lock file that we have."""

    fd: int
    waited: bool
    """Did another process have it before?"""

    def release(self) -> None:
        """Let another process have it."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)


@asynccontextmanager
async def exclusive(
    path: Path, waits_for: Callable[[str], None], released: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncIterator[Lock]:
    """Hold the lock file while in this context, or until it is released; waits while another process holds it.

    `waits_for` is told that process's ID, once; `released` waits so many seconds, or less where it knows that the lock is
    free. The file is left behind: whoever waits for it has it open.

    Raises:
        OSError: the file cannot be made, or is a link: what it leads to is not written.
    """
    fd, waits = files.open_ours(path), False
    try:
        while not _try_lock(fd) or not _is_at(fd, path):
            if not _is_at(fd, path):  # the directory was removed and made again: the file that lies there now counts
                fd, before = files.open_ours(path), fd
                os.close(before)
                continue
            if not waits:
                waits = True
                waits_for(_owner(fd))
            await released(_RETRY)
        os.ftruncate(fd, 0)
        try:
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except OSError as error:  # of a full disk: it does not say which file
            error.filename = str(path)
            raise
        yield Lock(fd, waits)
    finally:
        os.close(fd)


def identity(path: Path) -> tuple[int, int] | None:
    """Which file this is; None if there is none."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def holder(path: Path) -> str:
    """The process that has the lock; empty if none has it.

    Raises:
        FileNotFoundError: nobody has ever had it.
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # an agent that starts this instant looks again 0.1 s later
    except BlockingIOError:
        return _owner(fd)
    finally:
        os.close(fd)
    return ""


def _is_at(fd: int, path: Path) -> bool:
    found = os.fstat(fd)
    return identity(path) == (found.st_dev, found.st_ino)


def remove_leftovers(directory: Path) -> None:
    """Remove the sockets of an agent that was killed; only who holds the lock may call this.

    One at which a process listens is left: the agent that hands over to us lives, and may have to serve on.
    """
    for path in directory.iterdir():
        if path.is_socket() and not listens(path):
            path.unlink(missing_ok=True)


def _try_lock(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _owner(fd: int) -> str:
    return os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
