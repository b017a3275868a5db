"""One agent at a time on a plugin directory: a second one waits until the first is gone."""

from __future__ import annotations

import asyncio
import fcntl
import os
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_RETRY: Final = 0.1  # seconds; a flock cannot be waited for on an event loop

log = structlog.get_logger()


@asynccontextmanager
async def exclusive(path: Path) -> AsyncIterator[bool]:
    """Hold the lock file while in this context; waits as long as another process holds it, and says so once.

    Yields whether it had to wait. The file is left behind: whoever waits for it has it open.

    Raises:
        OSError: the file cannot be made.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        waits = not _try_lock(fd)
        if waits:
            log.warning("another-agent-runs", lock=str(path), pid=_owner(fd), then="waiting until it is gone")
            while not _try_lock(fd):  # noqa: ASYNC110  # another process sets no event of ours
                await asyncio.sleep(_RETRY)
            log.info("took-over", lock=str(path))
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield waits
    finally:
        os.close(fd)


def remove_leftovers(directory: Path) -> None:
    """Remove the sockets of an agent that was killed; to be called by whoever has the lock, which says that it is gone."""
    for path in directory.iterdir():
        if path.name != "lock" and path.is_socket():
            path.unlink(missing_ok=True)


def _try_lock(fd: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _owner(fd: int) -> str:
    return os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
