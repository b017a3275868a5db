"""Notices that this process is short of file descriptors or memory: no backend is blamed, and connections wait.

Of connections the log says so once: asyncio tries to accept them each second, and reports each try of each socket with a
traceback.
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Mapping
from typing import Any, Final

from agent.runtime.supervision.problems import Problems
from backends.errors import is_short, not_short

AGAIN: Final = 1.0
"""Seconds until the next try to accept a connection, as asyncio has it."""

_ENOUGH: Final = 1 << 20  # descriptors, where the hard limit is none
_SPARE: Final = 4  # descriptors that one look at a unit needs at the same time
_OVER: Final = 60.0  # seconds without a failed try after which the next one is reported again


# --- files that are read ---


def raise_limits() -> None:
    """Allow this process as many open files as it may have; systemd's and shells' default is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check() -> None:
    """Check that this process can open files: what was read while it could not is not to be believed.

    Raises:
        ShortageError: it cannot.
    """
    spare: list[int] = []
    try:
        spare.extend(os.open("/", os.O_PATH | os.O_CLOEXEC) for _ in range(_SPARE))
    except OSError as error:
        not_short(error)
    finally:
        for file in spare:
            os.close(file)


# --- connections ---


class Shortage:
    """Reports that connections wait."""

    def __init__(self, problems: Problems) -> None:
        self._waiting = problems.trouble(
            "connections", "connections to a socket of Fairlead wait", "connections-wait", level="error", fades=_OVER,
            then="trying again every second",
        )  # fmt: skip

    def tell(self, error: BaseException) -> None:
        """Report that a connection could not be accepted."""
        self._waiting.report_once((isinstance(error, OSError) and error.strerror) or str(error))

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception handler for the event loop."""
        error = context.get("exception")
        if error is not None and is_short(error) and "socket" in context:
            self.tell(error)
        elif not _is_over(context):
            loop.default_exception_handler(context)


def _is_over(context: Mapping[str, Any]) -> bool:
    """Did asyncio try again to accept connections at a socket that was closed meanwhile?

    `_accept_connection` of asyncio's selector_events plans as many tries as connections may wait (bpo-27906), and a
    server that closes takes none of them back.
    """
    callback = getattr(context.get("handle"), "_callback", None)
    return getattr(callback, "__name__", "") == "_start_serving" and isinstance(context.get("exception"), ValueError)
