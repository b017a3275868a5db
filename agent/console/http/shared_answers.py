"""Makes an expensive answer once for all clients that ask within a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_SHARE: Final = 10  # it is kept for ten times the CPU time it took: making it again and again costs a tenth of a core


class SharedAnswer(Generic[T]):
    """An answer that is made again once it is old."""

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """`spent` tells seconds of CPU: time in which the process stood still does not count."""
        self._make = make
        self._clock = clock
        self._spent = spent
        self._making = asyncio.Lock()
        self._made: T | None = None
        self._until = 0.0
        self._times = 0  # how often it was made

    async def get(self) -> T:
        """The answer, made now or a moment ago; clients that ask while it is made share it."""
        asked = self._times
        async with self._making:
            if self._made is None or (self._times == asked and self._clock() >= self._until):
                began = self._spent()
                self._made = await self._make()
                self._until = self._clock() + _SHARE * (self._spent() - began)
                self._times += 1
            return self._made
