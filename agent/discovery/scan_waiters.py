"""Keeps the calls that wait for a scan of certain units, and answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Set

from msgspec import Struct, field


class LookError(Exception):
    """A unit that a call waits for cannot be read; the sentence says which and why."""


class _Waiter(Struct, eq=False):
    units: frozenset[str]
    answer: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    begun: bool = False
    """Has the scan begun whose end it waits for? A scan that was under way when the call came may have read the unit before."""

    def fail(self, sentence: str) -> None:
        if not self.answer.done():
            self.answer.set_exception(LookError(sentence))


class Waiters:
    """The calls that have not been answered."""

    def __init__(self) -> None:
        self.waiting: list[_Waiter] = []

    async def wait(self, units: frozenset[str]) -> None:
        """Wait until a scan that has not begun yet has read these units.

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
        """Note that a scan of all units that calls wait for begins; the reads of the `stale` ones began earlier."""
        for waiter in self.waiting:
            waiter.begun |= waiter.units.isdisjoint(stale)

    def end(self, failed: Mapping[str, str], unended: Set[str] = frozenset()) -> None:
        """Answer whoever waited for that scan, but for units that are still `unended`; `failed` says why a read failed."""
        for waiter in self.waiting:
            if waiter.begun and not waiter.answer.done() and waiter.units.isdisjoint(unended):
                if sentences := [failed[unit] for unit in sorted(waiter.units & failed.keys())]:
                    waiter.fail("; ".join(sentences))
                else:
                    waiter.answer.set_result(None)

    def let_go(self) -> None:
        """Answer every waiter: these units are not scanned any more."""
        for waiter in self.waiting:
            if not waiter.answer.done():
                waiter.answer.set_result(None)

    def hangs(self, unit: str, sentence: str) -> None:
        """Fail every waiter for `unit` with `sentence`: its read hangs."""
        for waiter in self.waiting:
            if unit in waiter.units:
                waiter.fail(sentence)
