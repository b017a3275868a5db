"""Restarts a part of the daemon that failed, a little later each time, and reports it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import structlog

from agent.runtime.errors import words
from agent.runtime.pacing import Backoff
from agent.runtime.supervision.problems import Problems
from agent.runtime.supervision.watchdog import Pulse

_FIRST_DELAY: Final = 0.1  # seconds before a part that failed is started again, doubling
_MOST_DELAY: Final = 30.0  # seconds
_SETTLED_AFTER: Final = 60.0  # seconds after which a part that ran counts as healthy again
_FADES: Final = _SETTLED_AFTER + _MOST_DELAY  # seconds without a failure after which the faces show none

log = structlog.get_logger()


async def supervise(
    part: str, run: Callable[[], Awaitable[None]], pulse: Pulse | None = None, problems: Problems | None = None
) -> None:
    """Run a part for ever, and again when it ends or fails. `pulse` hears of each failure, and so does `problems`.

    Cancellation, and whatever else is no `Exception`, goes through.
    """
    backoff = Backoff(_FIRST_DELAY, _MOST_DELAY)
    trouble = (problems or Problems()).trouble(
        "restarts", f"{part} fails and is started again", "part-restarts", level="error", fades=_FADES, part=part
    )
    while True:
        began, ours = time.monotonic(), True
        try:
            await run()
            failure = "it ended, which it should not"
        except Exception as error:  # of any part, whatever it is; an ExceptionGroup too
            failure, ours = _words(error), not _is_systems(error)
            if ours and not trouble.is_known(failure):
                log.exception("part-failed", part=part)  # with its traceback
        if time.monotonic() - began >= _SETTLED_AFTER:
            backoff.reset()
            trouble.healed()
        trouble.report_once(failure)
        delay = backoff.next()
        if pulse is not None:
            pulse.failed(delay, ours=ours)
        await anyio.sleep(delay)


def _is_systems(error: BaseException) -> bool:
    """Is it an error of the system alone, and none of ours?"""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_systems(inner) for inner in error.exceptions)
    return isinstance(error, OSError)


def _words(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_words(inner) for inner in error.exceptions)
    return words(error) if str(error) else type(error).__name__
