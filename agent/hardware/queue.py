"""Runs one job at a time for each piece of hardware: claim, reset and release never run side by side.

A turn lasts until the thread that acts has come back, also where nobody waits for it any more: a call that hangs
costs one thread, however often it is tried again, and nothing is undone that is still being done.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Hashable, Set
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

from agent.runtime import pacing
from agent.runtime.workers import Workers

T = TypeVar("T")

LINGERS: Final = 5.0
"""Seconds after an act for which hardware may still go and come because of it: a slot trains its link anew within one
second, a look may take as long as a read may hang."""

LASTS: Final = 60.0
"""Seconds after which an act that has not ended is taken to hang: whatever goes and comes then does so by itself."""


class HangsError(Exception):
    """A job, or the wait for its turn, has taken too long."""


class Turn:
    """The right to act on some hardware."""

    def __init__(self) -> None:
        self._call: asyncio.Future[Any] | None = None

    @property
    def acts(self) -> bool:
        """Was a call made in it?"""
        return self._call is not None

    async def run(self, workers: Workers, call: Callable[[], T]) -> T:
        """Make one blocking call in a thread; if the caller is cancelled, the call keeps the turn.

        Raises:
            NoWorkerError: all threads are busy.
        """
        job: asyncio.Future[T] = workers.start(call)
        self._call = job
        await asyncio.wait([job])  # not shield: from Python 3.14 on it complains of an error that nobody waits for
        return job.result()

    def when_over(self, then: Callable[[], None]) -> None:
        """Call `then` once the call in this turn has returned; at once where none was made."""

        def is_back(job: asyncio.Future[Any]) -> None:
            if not job.cancelled():
                job.exception()  # reads the error, of which asyncio would complain otherwise
            then()

        if self._call is None:
            then()
        elif self._call.done():
            is_back(self._call)  # the caller may have been cancelled in the very turn in which it failed
        else:
            self._call.add_done_callback(is_back)


class HardwareQueue:
    """Gives turns: at most one for each piece of hardware."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[Turn, float] = {}  # of those that may move hardware
        self._ended = -math.inf  # the last of them
        self._taken: set[Hashable] = set()
        self._given_back = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Is any turn taken?"""
        return bool(self._taken)

    def have_effects(self) -> bool:
        """May hardware go or come now because of a call of ours, which runs or ended a moment ago?"""
        now = self._clock()
        acting = any(turn.acts and now - began < LASTS for turn, began in self._began.items())
        return acting or now - self._ended < LINGERS

    def is_taken(self, things: Set[Hashable]) -> bool:
        """Is the turn for any of these taken?"""
        return not self._taken.isdisjoint(things)

    @asynccontextmanager
    async def take(self, things: Set[Hashable], *, moves: bool = True) -> AsyncIterator[Turn]:
        """Wait until no turn for any of these is taken, and take it.

        Args:
            things: what is acted on.
            moves: may what is done make hardware go and come?
        """
        while self.is_taken(things):
            await self._given_back.wait()
        self._taken |= things
        turn = Turn()
        if moves:
            self._began[turn] = self._clock()
        try:
            yield turn
        finally:
            turn.when_over(partial(self._give_back, things, turn))

    @asynccontextmanager
    async def take_within(self, seconds: float, things: Set[Hashable], *, moves: bool = True) -> AsyncIterator[Turn]:
        """The same, for so many seconds, the wait included.

        Raises:
            HangsError: they were not enough.
        """
        try:
            async with pacing.running_timeout(seconds) as deadline, self.take(things, moves=moves) as turn:
                yield turn
        except TimeoutError:
            if not deadline.cancel_called:
                raise  # it is a backend's own
            raise HangsError(f"not done within {seconds:g} s") from None

    def _give_back(self, things: Set[Hashable], turn: Turn) -> None:
        self._taken -= things
        if self._began.pop(turn, None) is not None and turn.acts:
            self._ended = self._clock()
        given_back, self._given_back = self._given_back, asyncio.Event()
        given_back.set()
