"""Finds the best subset out of nested groups, by what slots are worth alone and in pairs; pure.

A solved part has a table: the most that can be had with none, one, two ... of its slots. The tables of a group are joined size by
size, which is exact: what two of its parts are worth to each other depends on the numbers alone. A `Web` is searched.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat
from operator import add, mul
from types import MappingProxyType
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from agent.placement.affinity import Group, Part


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
    """A solved part.

    For n of its slots it has 2 v(n) - w n^2, where v is what they are worth and w what two slots of different parts are worth
    in the group around it: so the sum over all parts of a group has the pairs between them, too.
    """

    room: int
    """How many slots it has, as far as they could be taken."""
    more: Sequence[int] = ()
    """What n slots have beyond those within."""
    _values: list[int] | None = None

    @property
    def values(self) -> list[int]:
        """The most that can be had with none, one, two ... of its slots; worked out when first needed."""
        if self._values is None:  # cached_property takes a lock in Python 3.11: 4 us
            within = self._within()
            self._values = list(map(add, within, self.more)) if self.more else within
        return self._values

    @abstractmethod
    def _within(self) -> list[int]:
        """The values but for `more`."""

    @abstractmethod
    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        """The members that make this size, and how many slots of each."""


class _Known(Struct, frozen=True):
    """What was worked out already: a machine has many parts that are alike."""

    joined: dict[Sequence[Sequence[int]], list[int]] = field(default_factory=dict)
    """The tables of two parts → that of both together."""
    searches: dict[Sequence[Sequence[int]], Search] = field(default_factory=dict)
    """The tables of a web's parts, and what slots of two of them are worth together → its search."""


class _Solver(Struct, frozen=True):
    members: Mapping[int, Member]
    worth: int
    size: int
    gains: Mapping[frozenset[int], Sequence[int]]
    known: _Known = field(default_factory=_Known)

    def solve(self, part: Part, around: int = 0) -> _Table:
        """`around`: what two slots of different parts are worth in the group that this is a part of."""
        table: _Table
        if isinstance(part, int):
            table, bent = _Single(part, self.members[part], around, self.size), 0
        elif isinstance(part, Group):
            own = self.worth * part.affinity
            table, bent = self._joined([self.solve(one, own) for one in part.parts]), own - around
        else:
            weights = [[2 * self.worth * near for near in row] for row in part.affinities]
            table, bent = _Searched([self.solve(one) for one in part.parts], weights, self.size, self.known), -around
        gain = self.gains.get(_members(part)[0]) if self.gains else None
        if bent or gain:
            table.more = [2 * gain[n] + bent * n * n if gain else bent * n * n for n in range(table.room + 1)]
        return table

    def _joined(self, tables: Sequence[_Table]) -> _Table:
        joined = [table for table in tables if table.room > 1]
        joined.sort(key=lambda table: table.values)  # what is alike is joined first, and has to be joined but once
        if singles := [table for table in tables if table.room == 1]:
            joined.insert(0, _Row(singles, self.size))
        while len(joined) > 1:  # by twos, so that long tables are joined but few times
            odd = joined[-1:] if len(joined) % 2 else []
            joined = [
                _Joined(*two, self.size, self.known) for two in zip(joined[::2], joined[1::2], strict=False)
            ] + odd
        return joined[0]


class _Single(_Table):
    """One member."""

    def __init__(self, number: int, member: Member, around: int, size: int) -> None:
        self._number, self._single, self._pair = number, 2 * member.single - member.pair, member.pair - around
        self.room = min(member.room, size)

    def _within(self) -> list[int]:
        return [n * self._single + n * n * self._pair for n in range(self.room + 1)]

    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        yield self._number, size


class _Row(_Table):
    """Parts of one slot each, of which the best are taken."""

    def __init__(self, tables: Sequence[_Table], size: int) -> None:
        self._tables = sorted(tables, key=lambda table: -table.values[1])[:size]
        self.room = len(self._tables)

    def _within(self) -> list[int]:
        return list(accumulate((table.values[1] for table in self._tables), initial=0))

    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        for table in self._tables[:size]:
            yield from table.pick(1)


class _Joined(_Table):
    """Two parts of a group, some of each."""

    def __init__(self, one: _Table, other: _Table, size: int, known: _Known) -> None:
        self._one, self._other, self._known = one, other, known
        self.room = min(one.room + other.room, size)

    def _within(self) -> list[int]:
        known, key = self._known.joined, (tuple(self._one.values), tuple(self._other.values))
        if key not in known:
            known[key] = [max(self._sums(size)) for size in range(self.room + 1)]
        return known[key]

    def _sums(self, size: int) -> Iterator[int]:
        """What both have with so many slots in all, by how many of them are of the first part; the most come first."""
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

    def __init__(self, parts: Sequence[_Table], weights: Sequence[Sequence[int]], size: int, known: _Known) -> None:
        self._parts = parts
        self.room = min(sum(part.room for part in parts), size)
        key = tuple(tuple(row) for row in (*(part.values for part in parts), *weights))
        if key not in known.searches:
            known.searches[key] = Search(key[: len(parts)], weights)
        self._best = known.searches[key].best

    def _within(self) -> list[int]:
        return [self._best(size)[0] for size in range(self.room + 1)]

    def pick(self, size: int) -> Iterator[tuple[int, int]]:
        for part, number in zip(self._parts, self._best(size)[1], strict=True):
            yield from part.pick(number)


# --- a web: branch and bound ---
#
# Up to `EXACT` slots what it finds is proved to be the best. Beyond that it stops when its effort is spent, with the
# best so far: never worse than taking the best one at a time and then exchanging one for another.

EXACT: Final = 20  # slots; the worst of 20 takes 15 ms, of 24 a tenth of a second

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
        self._is_exact = self._room_from[0] <= EXACT
        self._effort = sys.maxsize if self._is_exact else _EFFORT
        steps = [[2 * step for step in _hull(table)] for table in tables]
        every = self._nearest(0)
        near = [self._nearest(part) if self._is_exact else every[part:] for part in self._parts]
        self._reach = [list(zip(rows, steps[part:], strict=True)) for part, rows in enumerate(near)]
        self._grown: list[Counts] = [[0] * len(tables)]  # by size, the best taken one at a time
        self._found: dict[int, tuple[int, Counts]] = {}

    def _nearest(self, first: int) -> list[list[int]]:
        """Of each part from `first` on: the most that 0, 1, 2 ... slots of these parts are worth to one of its slots."""
        rooms = self._rooms[first:]
        rows = [chain.from_iterable(map(repeat, row[first:], rooms)) for row in self._weights[first:]]
        return [[0, *accumulate(sorted(row, reverse=True))] for row in rows]

    def best(self, size: int) -> tuple[int, Counts]:
        """The best of this size, and its worth; there must be as many slots."""
        if size not in self._found:
            self._counts = self._greedy(size) if self._is_exact else self._exchanged(self._greedy(size))
            self._worth = self._worth_of(self._counts)
            self._descend(0, size, 0, [0] * len(self._parts), [])
            self._found[size] = self._worth, self._counts
        return self._found[size]

    def _worth_of(self, counts: Counts) -> int:
        singles: int = sum(table[number] for table, number in zip(self._tables, counts, strict=True))
        pairs: int = sum(map(mul, counts, self._towards(counts))) // 2
        return singles + pairs

    def _towards(self, counts: Counts) -> list[int]:
        """What these are worth to one slot of each part."""
        return [sum(map(mul, counts, row)) for row in self._weights]

    def _is_spent(self, effort: int) -> bool:
        self._effort -= effort
        return self._effort < 0

    # --- a good one to begin with ---

    def _steps(self, counts: Counts) -> list[tuple[int, int]]:
        """Of each part with room: what one slot more is worth by itself, and the part."""
        return [
            (self._tables[part][number + 1] - self._tables[part][number], part)
            for part, number in enumerate(counts)
            if number < self._rooms[part]
        ]

    def _greedy(self, size: int) -> Counts:
        while len(self._grown) <= size:
            counts = [*self._grown[-1]]
            near = self._towards(counts)
            _, taken = max(((step + near[part], -part) for step, part in self._steps(counts)))
            counts[-taken] += 1
            self._grown.append(counts)
        return self._grown[size]

    def _exchanged(self, counts: Counts) -> Counts:
        """Give one slot for another as long as that is worth more."""
        counts = [*counts]
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
        for (near, steps), gain in zip(self._reach[part], gains, strict=True):
            halves = 2 * gain + near[size - 1]
            offers += [step + halves for step in steps[:size]]
        offers.sort(reverse=True)
        return worth + sum(offers[:size]) // 2


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
