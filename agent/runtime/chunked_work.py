"""Splits work on thousands of devices into short steps of the event loop, between which other tasks run.

A thread would not do: it holds the interpreter for 5 ms at a time (sys.getswitchinterval), whoever waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from itertools import islice
from typing import Final, TypeVar

T = TypeVar("T")

SLICE: Final = 0.001
"""Seconds after which other tasks have their turn."""

BATCH: Final = 100
"""Devices, or claims, whose state is changed in one step of the loop: 100 us each at most make 10 ms."""


async def in_slices(pieces: Iterable[T]) -> list[T]:
    """The items of an iterable that computes them one by one; each must take far less than a slice."""
    made: list[T] = []
    until = time.perf_counter() + SLICE
    for piece in pieces:
        made.append(piece)
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE
    return made


async def in_batches(items: Iterable[T], size: int = BATCH) -> AsyncIterator[list[T]]:
    """Yield the items in batches; other tasks run between two batches.

    It is for work that changes state: at the end of each batch that state is consistent, and the same items make the
    same batches on any machine.
    """
    left = iter(items)
    batch = list(islice(left, size))
    while batch:
        yield batch
        if batch := list(islice(left, size)):
            await asyncio.sleep(0)
