"""Searches the best subset of one size by branch and bound; pure.

Up to `EXACT` slots what it finds is proved to be the best. Beyond that it stops when its effort is spent, with the best so
far: never worse than taking the best one at a time and then exchanging one for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from itertools import accumulate
from operator import add, mul
from typing import Final

EXACT: Final = 16

_EFFORT: Final = 15_000  # slots looked at, all in all; 0.6 us each

Counts = list[int]
"""How many slots of each part."""


class Search:
    """Parts, each with the worth of none, one, two ... of its slots, and what slots of two parts are worth together."""

    def __init__(self, tables: Sequence[Sequence[int]], weights: Sequence[Sequence[int]]) -> None:
        """Prepare; no weight may be below 0."""
        self._tables = tables
        self._parts = range(len(tables))
        self._weights = [
            [0 if one == other else row[other] for other in self._parts] for one, row in enumerate(weights)
        ]
        self._rooms = [len(table) - 1 for table in tables]
        self._room_from = [sum(self._rooms[part:]) for part in range(len(tables) + 1)]
        self._hulls = [_hull(table) for table in tables]
        self._is_exact = self._room_from[0] <= EXACT
        self._near = [self._nearest(first) for first in (self._parts if self._is_exact else range(1))]
        self._effort = _EFFORT

    def _nearest(self, first: int) -> list[list[int]]:
        """Of each part: the most that 0, 1, 2 ... slots of others, from part `first` on, are worth to one of its slots."""
        rows = [
            [weight for other in self._parts[first:] if other != part for weight in [row[other]] * self._rooms[other]]
            for part, row in enumerate(self._weights)
        ]
        return [[0, *accumulate(sorted(row, reverse=True))] for row in rows]

    def best(self, size: int) -> tuple[int, Counts]:
        """The best of this size, and its worth; there must be as many slots."""
        self._counts = self._exchanged(self._greedy(size))
        self._worth = self._worth_of(self._counts)
        self._descend(0, size, 0, [0] * len(self._parts), [])
        return self._worth, self._counts

    def _worth_of(self, counts: Counts) -> int:
        singles: int = sum(table[number] for table, number in zip(self._tables, counts, strict=True))
        pairs: int = sum(map(mul, counts, self._towards(counts))) // 2
        return singles + pairs

    def _towards(self, counts: Counts) -> list[int]:
        """What these are worth to one slot of each part."""
        return [sum(map(mul, counts, row)) for row in self._weights]

    def _is_spent(self, effort: int) -> bool:
        self._effort -= effort
        return self._effort < 0 and not self._is_exact

    # --- a good one to begin with ---

    def _steps(self, counts: Counts) -> list[tuple[int, int]]:
        """Of each part with room: what one slot more is worth by itself, and the part."""
        return [
            (self._tables[part][number + 1] - self._tables[part][number], part)
            for part, number in enumerate(counts)
            if number < self._rooms[part]
        ]

    def _greedy(self, size: int) -> Counts:
        counts, near = [0] * len(self._parts), [0] * len(self._parts)
        for _ in range(size):
            steps = self._steps(counts)
            gains = [step + near[part] for step, part in steps]
            taken = steps[gains.index(max(gains))][1]
            counts[taken] += 1
            near = list(map(add, near, self._weights[taken]))
        return counts

    def _exchanged(self, counts: Counts) -> Counts:
        """Give one slot for another as long as that is worth more."""
        while any(counts) and not self._is_spent(len(counts) ** 2 // 2):
            near = self._towards(counts)
            gain, given, taken = max(
                self._exchange(counts, near, given) for given, number in enumerate(counts) if number
            )
            if gain <= 0:
                break
            counts[given] -= 1
            counts[taken] += 1
        return counts

    def _exchange(self, counts: Counts, near: Sequence[int], given: int) -> tuple[int, int, int]:
        """The best exchange for one slot of this part: what is gained, what is given, what is taken."""
        table, row, number = self._tables[given], self._weights[given], counts[given]
        loss = table[number] - table[number - 1] + near[given]
        gains = [(step + near[part] - row[part], part) for step, part in self._steps(counts) if part != given]
        gain, taken = max(gains, default=(loss, given))
        return gain - loss, given, taken

    # --- all others, less those that cannot be better ---

    def _descend(self, part: int, size: int, worth: int, gains: Sequence[int], counts: Counts) -> None:
        """Try every number of this part and those after it, to make `size` more.

        Args:
            part: the first that is not decided.
            size: how many slots are still to be taken.
            worth: of those taken.
            gains: what those taken are worth to one slot of each part that is not decided.
            counts: those taken.
        """
        if not size:
            if worth > self._worth:
                self._worth, self._counts = worth, [*counts, *[0] * (len(self._parts) - part)]
            return
        if self._is_spent(self._room_from[part]) or self._bound(part, size, worth, gains) <= self._worth:
            return
        most, least = min(self._rooms[part], size), max(0, size - self._room_from[part + 1])
        row, table = self._weights[part][part + 1 :], self._tables[part]
        for number in range(most, least - 1, -1):
            nearer = [gain + number * weight for gain, weight in zip(gains[1:], row, strict=True)]
            self._descend(part + 1, size - number, worth + table[number] + number * gains[0], nearer, [*counts, number])

    def _bound(self, part: int, size: int, worth: int, gains: Sequence[int]) -> int:
        """What no way to take `size` more can pass.

        Each slot is given the slots that are nearest to it, whatever the others choose; half of each pair is its own.
        """
        offers: list[int] = []
        nearest = self._near[part if self._is_exact else 0]
        for number, gain in enumerate(gains, part):
            near = nearest[number]
            halves = 2 * gain + near[min(size, len(near)) - 1]
            offers += [2 * step + halves for step in self._hulls[number][:size]]
        return worth + sum(nlargest(size, offers)) // 2


def _hull(table: Sequence[int]) -> list[int]:
    """What each further slot adds at most, never more than the one before it: the table's least concave cover."""
    steps: list[tuple[int, int]] = []  # slots, and what they add together
    for number in range(1, len(table)):
        slots, added = 1, table[number] - table[number - 1]
        while steps and steps[-1][1] * slots < added * steps[-1][0]:
            before, more = steps.pop()
            slots, added = slots + before, added + more
        steps.append((slots, added))
    return [-(-added // slots) for slots, added in steps for _ in range(slots)]
