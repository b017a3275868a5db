"""Keeps the calls that wait for a fresh scan of certain units."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set

from msgspec import Struct, field


class LookError(Exception):
    """A unit that somebody waits for cannot be looked at; the sentence says which and why."""


class _Waiter(Struct, eq=False):
    units: frozenset[str]
    answer: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    begun: bool = False
    """Has the scan begun whose end it waits for? One that was under way when it came tells nothing of what is now."""

    def fail(self, sentence: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(LookError(sentence))


class Waiters:
    """Whoever asked for a look and has not been answered."""

    def __init__(self) -> None:
        self.waiting: list[_Waiter] = []

    async def wait(self, units: frozenset[str]) -> None:
        """Wait until a scan that has not begun yet has looked at these units.

        Raises:
            LookError: one of them cannot be read.
        """
        waiter = _Waiter(units)
        self.waiting.append(waiter)
        try:
            await waiter.answer
        finally:
            self.waiting.remove(waiter)

    def begin(self, stale: Set[str] = frozenset()) -> None:
        """A scan begins that covers all units that are waited for, but those whose read began earlier."""
        for waiter in self.waiting:
            waiter.begun |= waiter.units.isdisjoint(stale)

    def end(self, failed: Mapping[str, str], unended: Set[str] = frozenset()) -> None:
        """That scan has ended but for what is `unended`; of the units that could not be read, why."""
        for waiter in self.waiting:
            if waiter.begun and not waiter.answer.done() and waiter.units.isdisjoint(unended):
                if sentences := [failed[unit] for unit in sorted(waiter.units & failed.keys())]:
                    waiter.fail("; ".join(sentences))
                else:
                    waiter.answer.set_result(None)

    def let_go(self) -> None:
        """There is nothing to be looked at any more."""
        for waiter in self.waiting:
            if not waiter.answer.done():
                waiter.answer.set_result(None)

    def hangs(self, unit: str, sentence: str) -> None:
        """Nobody will hear of this unit soon."""
        for waiter in self.waiting:
            if unit in waiter.units:
                waiter.fail(sentence)
