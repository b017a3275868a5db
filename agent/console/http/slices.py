"""Work on the event loop in slices, so that an allocation never waits for a page to be drawn.

A thread would not do: it holds the interpreter for 5 ms at a time (sys.getswitchinterval), whoever waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Final, TypeVar

T = TypeVar("T")

SLICE: Final = 0.001
"""Seconds after which others on the loop have their turn."""


async def in_slices(pieces: Iterable[T]) -> list[T]:
    """All that an iterable, which works while it is iterated, has; each piece must take far less than a slice."""
    made: list[T] = []
    until = time.perf_counter() + SLICE
    for piece in pieces:
        made.append(piece)
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE
    return made
