"""Finds the best subset out of nested groups, by what slots are worth alone and in pairs; pure.

A solved part has a table: the most that can be had with none, one, two ... of its slots. Tables of a group are joined size
by size, which is exact: what two parts are worth to each other depends on the numbers alone. Of a `Web` all combinations are looked at where they
are few; else it is searched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from heapq import nlargest
from itertools import accumulate, chain
from math import prod
from operator import add, mul
from types import MappingProxyType
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from agent.placement.clusters import Group, Part


class Member(Struct, frozen=True):
    """A device with slots of which any is as good as the others."""

    room: int
    """How many slots can be taken."""
    single: int
    """What each is worth by itself."""
    pair: int = 0
    """What any two of them are worth together."""


def best(
    part: Part,
    members: Mapping[int, Member],
    worth: int,
    size: int,
    gains: Mapping[frozenset[int], Sequence[int]] = MappingProxyType({}),
) -> dict[int, int]:
    """How many slots to take of which member.

    Args:
        part: the members by their numbers, in their groups.
        members: what they are.
        worth: by which the affinities of the groups are multiplied.
        size: how many slots in all; there must be as many.
        gains: what none, one, two ... slots of these members add, up to `size`. Where the members are no part by
            themselves, as below a bridge that links reach across, each slot adds what one adds.
    """
    apart = gains.keys() - set(_members(part)) if gains else ()
    alone = [(them, gains[them][1]) for them in apart]
    if alone:
        members = {
            it: replace(one, single=one.single + sum(gain for them, gain in alone if it in them))
            for it, one in members.items()
        }
    table = _Solver(members, worth, size, gains).solve(part)
    return {member: number for member, number in table.pick(size) if number}


def _members(part: Part) -> list[frozenset[int]]:
    """The members of the part, and after these of each part within it."""
    if isinstance(part, int):
        return [frozenset((part,))]
    within = [_members(one) for one in part.parts]
    return [frozenset().union(*(one[0] for one in within)), *chain.from_iterable(within)]


class _Table(ABC):
    """A solved part."""

    room: int
    """How many slots it has, as far as they could be taken."""

    _values: list[int] | None = None

    @property
    def values(self) -> list[int]:
        """The most that none, one, two ... of its slots are worth; worked out when first needed."""
        if self._values is None:  # cached_property takes a lock in Python 3.11: 4 us
            self._values = self._work_out()
        return self._values

    @abstractmethod
    def _work_out(self) -> list[int]:
        """The values."""

    @abstractmethod
    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        """The members that make this size, and how many slots of each."""


_Known = dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]
"""The tables of two parts → that of both together: a machine has many parts that are alike."""


class _Solver(Struct, frozen=True):
    members: Mapping[int, Member]
    worth: int
    size: int
    gains: Mapping[frozenset[int], Sequence[int]]
    known: _Known = field(default_factory=dict)

    def solve(self, part: Part) -> _Table:
        table = self._solve(part)
        if self.gains and (gain := self.gains.get(_members(part)[0])):
            return _Gaining(table, gain)
        return table

    def _solve(self, part: Part) -> _Table:
        if isinstance(part, int):
            return _Single(part, self.members[part], self.size)
        solved = [self.solve(one) for one in part.parts]
        if isinstance(part, Group):
            return self._group(solved, self.worth * part.affinity)
        return _Searched(solved, [[self.worth * near for near in row] for row in part.affinities], self.size)

    def _group(self, solved: Sequence[_Table], weight: int) -> _Table:
        """With each v(n) bent to 2 v(n) - weight n^2 the pairs between two parts are in the sum of their values."""
        tables = [_Bent(one, weight) for one in solved]
        joined: list[_Table] = [table for table in tables if table.room > 1]
        joined.sort(key=lambda table: table.values)  # what is alike is joined first, and has to be joined but once
        if singles := [table for table in tables if table.room == 1]:
            joined.insert(0, _Row(singles, self.size))
        while len(joined) > 1:  # by twos, so that long tables are joined but few times
            odd = joined[-1:] if len(joined) % 2 else []
            pairs = zip(joined[::2], joined[1::2], strict=False)
            joined = [_Joined(*two, self.size, self.known) for two in pairs] + odd
        return _Straight(joined[0], weight)


class _Single(_Table):
    """One member."""

    def __init__(self, number: int, member: Member, size: int) -> None:
        self._number, self._member = number, member
        self.room = min(member.room, size)

    def _work_out(self) -> list[int]:
        single, pair = self._member.single, self._member.pair
        return [n * single + n * (n - 1) // 2 * pair for n in range(self.room + 1)]

    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        yield self._number, size


class _Gaining(_Table):
    """A part of which some slots together add something."""

    def __init__(self, table: _Table, gain: Sequence[int]) -> None:
        self._table, self._gain = table, gain
        self.room = table.room

    def _work_out(self) -> list[int]:
        return list(map(add, self._table.values, self._gain))

    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        return self._table.pick(size)


class _Bent(_Table):
    """A part on its way into a group with this weight between parts."""

    def __init__(self, table: _Table, weight: int) -> None:
        self._table, self._weight = table, weight
        self.room = table.room

    def _work_out(self) -> list[int]:
        return [2 * value - self._weight * n * n for n, value in enumerate(self._table.values)]

    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        return self._table.pick(size)


class _Straight(_Bent):
    """A joined group, with its true worth again."""

    def _work_out(self) -> list[int]:
        return [(value + self._weight * n * n) // 2 for n, value in enumerate(self._table.values)]


class _Row(_Table):
    """Parts of one slot each, of which the best are taken."""

    def __init__(self, tables: Sequence[_Table], size: int) -> None:
        self._tables = sorted(tables, key=lambda table: -table.values[1])[:size]
        self.room = len(self._tables)

    def _work_out(self) -> list[int]:
        return list(accumulate((table.values[1] for table in self._tables), initial=0))

    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        for table in self._tables[:size]:
            yield from table.pick(1)


class _Joined(_Table):
    """Two parts, some of each."""

    def __init__(self, one: _Table, other: _Table, size: int, known: _Known) -> None:
        self._one, self._other, self._known = one, other, known
        self.room = min(one.room + other.room, size)

    def _work_out(self) -> list[int]:
        key = tuple(self._one.values), tuple(self._other.values)
        if key not in self._known:
            self._known[key] = [max(self._sums(size)) for size in range(self.room + 1)]
        return self._known[key]

    def _sums(self, size: int) -> Iterator[int]:
        """What it is worth with so many slots in all, by how many of them are of the first part; the most come first."""
        one, other = self._one, self._other
        least, most = max(0, size - other.room), min(size, one.room)
        return map(add, one.values[least : most + 1][::-1], other.values[size - most :])

    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        sums = list(self._sums(size))
        of_one = min(size, self._one.room) - sums.index(max(sums))
        yield from self._one.pick(of_one)
        yield from self._other.pick(size - of_one)


class _Searched(_Table):
    """The parts of a `Web`, some of each."""

    def __init__(self, parts: Sequence[_Table], weights: Sequence[Sequence[int]], size: int) -> None:
        self._parts, self._weights = parts, weights
        self.room = min(sum(part.room for part in parts), size)

    @cached_property
    def _best(self) -> Callable[[int], tuple[int, Sequence[int]]]:
        """Size → the worth of the best, and how many of each part make it."""
        tables = [part.values for part in self._parts]
        if are_few(tables):
            return enumerate_all(tables, self._weights).__getitem__
        return cache(Search(tables, self._weights).best)

    def _work_out(self) -> list[int]:
        return [self._best(size)[0] for size in range(self.room + 1)]

    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        for part, number in zip(self._parts, self._best(size)[1], strict=True):
            yield from part.pick(number)


# --- all combinations, where they are few; pure ---
#
# For few of them this is faster than `search`, and it gives all sizes at once.

_MOST_COMBINATIONS: Final = 1024  # combinations; 1 us each


def are_few(tables: Sequence[Sequence[int]]) -> bool:
    """Are all combinations of these parts few enough?"""
    return prod(map(len, tables)) <= _MOST_COMBINATIONS


def enumerate_all(
    tables: Sequence[Sequence[int]], weights: Sequence[Sequence[int]]
) -> Mapping[int, tuple[int, Sequence[int]]]:
    """Size → what the best of that size is worth, and how many slots of each part make it.

    Args:
        tables: of each part, the worth of none, one, two ... of its slots.
        weights: what slots of two parts are worth together.
    """
    values, sizes = [0], [0]
    for part, table in enumerate(tables):
        near = [0]  # what one slot of this part is worth to each combination of those before it
        for before in range(part):
            weight = weights[part][before]
            near = [value + number * weight for number in range(len(tables[before])) for value in near]
        values = [
            value + worth + number * gain
            for number, worth in enumerate(table)
            for value, gain in zip(values, near, strict=True)
        ]
        sizes = [size + number for number in range(len(table)) for size in sizes]
    best: dict[int, int] = {}
    for combination, size in enumerate(sizes):
        if size not in best or values[combination] > values[best[size]]:
            best[size] = combination
    return {size: (values[best[size]], _counts_of(best[size], tables)) for size in sorted(best)}


def _counts_of(combination: int, tables: Sequence[Sequence[int]]) -> Sequence[int]:
    """Its number has a digit for each part, the first part's the lowest."""
    counts = []
    for table in tables:
        combination, count = divmod(combination, len(table))
        counts.append(count)
    return counts


# --- the best subset of one size by branch and bound; pure ---
#
# Up to `EXACT` slots what it finds is proved to be the best. Beyond that it stops when its effort is spent, with the
# best so far: never worse than taking the best one at a time and then exchanging one for another.

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
