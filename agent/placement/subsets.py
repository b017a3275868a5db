"""Finds the best subset out of nested groups, by what slots are worth alone and in pairs; pure.

A solved part has a table: the most that can be had with none, one, two ... of its slots. Tables of a group are joined size
by size, which is exact: what two parts are worth to each other depends on the numbers alone. Of a `Web` all combinations are looked at where they
are few; else it is searched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate, chain
from operator import add
from types import MappingProxyType

from msgspec import Struct, field
from msgspec.structs import replace

from agent.placement.clusters import Group, Part
from agent.placement.enumeration import are_few, enumerate_all
from agent.placement.search import Search


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
