"""One agent at a time on a plugin directory: a second one waits until the first is gone."""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.kubelet.client import listens
from backends.linux import files

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_RETRY: Final = 0.1  # seconds; a flock cannot be waited for on an event loop


class Lock:
    """A lock file."""

    def __init__(self, path: Path) -> None:
        """Open it; it is not locked yet.

        Raises:
            OSError: the file cannot be made, or is a link: what it leads to is not written.
        """
        self._path, self._fd = path, files.open_ours(path)
        self.waited = False
        """Whether another process had it before."""

    @property
    def is_in_place(self) -> bool:
        """Whether the file at the path is the one that we have open."""
        found = os.fstat(self._fd)
        return identity(self._path) == (found.st_dev, found.st_ino)

    @property
    def is_replaced(self) -> bool:
        """Whether another agent has put its own lock file into the place of this one. A removed directory has none."""
        found, ours = identity(self._path), os.fstat(self._fd)
        return found is not None and found != (ours.st_dev, ours.st_ino)

    @property
    def owner(self) -> str:
        """The process that has it."""
        return _owner(self._fd)

    def take(self) -> bool:
        """Lock the file that lies at the path now; False while another process has it.

        Raises:
            OSError: as at the start; the directory was removed and made again, or an agent has taken its lock back.
        """
        while True:
            if not self.is_in_place:
                self._open(self._path)
            elif not _try_lock(self._fd):
                return False
            elif self.is_in_place:
                return True

    def sign(self) -> None:
        """Write our process ID into it.

        Raises:
            OSError: the disk is full.
        """
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except OSError as error:
            error.filename = str(self._path)  # which no error of a descriptor has
            raise

    def release(self) -> None:
        """Let another process have it."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def take_back(self) -> None:
        """Have it after `release`: if another process has it, by a file that is put into its place and counts from then on.

        Raises:
            OSError: there can be no such file.
        """
        fresh = None
        if not self.take():
            self._open(fresh := self._path.with_name(f".{self._path.name}"))
            _try_lock(self._fd)
        with suppress(OSError):  # a full disk keeps our process ID from those who wait, not the lock from us
            self.sign()
        if fresh is not None:
            fresh.rename(self._path)

    def close(self) -> None:
        """Let it go for good."""
        os.close(self._fd)

    def _open(self, path: Path) -> None:
        before, self._fd = self._fd, files.open_ours(path)
        os.close(before)


@asynccontextmanager
async def exclusive(
    path: Path, waits_for: Callable[[str], None], released: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncIterator[Lock]:
    """Hold the lock file while in this context, or until it is released; waits while another process holds it.

    `waits_for` is told that process's ID, once; `released` waits so many seconds, or less where it knows that the lock is
    free. The file is left behind: a process that waits for it has it open.

    Raises:
        OSError: the file cannot be made, or is a link: what it leads to is not written.
    """
    lock = Lock(path)
    try:
        while not lock.take():
            if not lock.waited:
                lock.waited = True
                waits_for(lock.owner)
            await released(_RETRY)
        lock.sign()
        yield lock
    finally:
        lock.close()


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
        FileNotFoundError: no process has ever had it.
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


def remove_leftovers(directory: Path) -> None:
    """Remove the sockets of an agent that was killed; only who holds the lock may call this.

    One at which a process listens is left: the agent that hands over to us lives, and may have to serve on.
    """
    for path in directory.iterdir():
        if path.is_socket() and not listens(path):
            with suppress(OSError):  # of a read-only disk, where it does no harm
                path.unlink()


def _try_lock(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _owner(fd: int) -> str:
    return os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
