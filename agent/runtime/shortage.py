"""What becomes of connections for which the system has no descriptor or memory: they wait, and the log says so once.

asyncio tries to accept them each second, and reports each try of each socket with a traceback.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from typing import Any, Final

import structlog

AGAIN: Final = 1.0
"""Seconds until the next try to accept a connection, as asyncio has it."""

_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_OVER: Final = 60.0  # seconds without a failed try, after which another one is told

log = structlog.get_logger()


def is_short(error: BaseException | None) -> bool:
    """Is the system out of what a connection takes?"""
    return isinstance(error, OSError) and error.errno in _SHORT


class Shortage:
    """Tells of connections that wait, once as long as they do."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -_OVER

    def tell(self, error: BaseException) -> None:
        """A connection could not be accepted."""
        last, self._last = self._last, self._clock()
        if self._last - last >= _OVER:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            log.error("connections-wait", reason=reason, then="trying again every second")

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception handler for the event loop."""
        error = context.get("exception")
        if error is not None and is_short(error) and "socket" in context:
            self.tell(error)
        else:
            loop.default_exception_handler(context)
