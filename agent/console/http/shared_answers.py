"""Makes an expensive answer once for all clients that ask within a moment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_SHARE: Final = 10  # it is kept for ten times the CPU time it took: making it again and again costs a tenth of a core


class SharedAnswer(Generic[T]):
    """The newest of something that is asked for."""

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """Prepare; `spent` tells seconds of CPU: where the process only stood still, nothing is kept the longer."""
        self._make = make
        self._clock = clock
        self._spent = spent
        self._making = asyncio.Lock()
        self._made: T | None = None
        self._until = 0.0
        self._times = 0  # that it was made

    async def get(self) -> T:
        """As it is now, or was a moment ago; who asks while it is made gets that."""
        asked = self._times
        async with self._making:
            if self._made is None or (self._times == asked and self._clock() >= self._until):
                began = self._spent()
                self._made = await self._make()
                self._until = self._clock() + _SHARE * (self._spent() - began)
                self._times += 1
            return self._made
