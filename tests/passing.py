"""Lets time pass on the running event loop: for deadlines that are not handed a clock."""

from __future__ import annotations

import asyncio


def pass_time(seconds: float) -> None:
    """Everything that is due within so many seconds is due now, in its order; of use once in a test's own loop."""
    loop = asyncio.get_running_loop()
    time = loop.time
    loop.time = lambda: time() + seconds  # type: ignore[method-assign]
