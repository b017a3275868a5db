"""Cuts devices into nested groups, so that the best choice is found group by group and not among all subsets.

What a group's members are worth to a device outside must not depend on the member. Then only how many are taken of
each group matters to the others. PCI alone makes a tree of such groups. With links they have to be looked for; what
cannot be cut, such as the cube mesh of a DGX-1, stays a `Web`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Final

from msgspec import Struct

from agent.placement.affinity import LEVELS, Topology

LINKED_MOST: Final = 128
"""Devices whose links are taken into account: all their pairs are looked at. A node has 16 GPUs, 64 with partitions."""


class Group(Struct, frozen=True):
    """Parts of which any two members of different ones are worth the same."""

    affinity: int
    parts: tuple[Part, ...]


class Web(Struct, frozen=True):
    """Parts that are near to some and far from others, in no order."""

    affinities: tuple[tuple[int, ...], ...]
    """Of part and part; the diagonal means nothing."""
    parts: tuple[Part, ...]


Part = int | Group | Web
"""A device by its number, or several."""


def clusters(topology: Topology, devices: Sequence[int]) -> Part:
    """These devices, at least one, as nested groups."""
    if len(devices) > LINKED_MOST or topology.links.keys().isdisjoint(devices):
        return _tree(topology, devices, 0)
    affinities = {one: {other: topology.affinity(one, other) for other in devices} for one in devices}
    return _cut({device: device for device in devices}, affinities)


def _tree(topology: Topology, devices: Sequence[int], level: int) -> Part:
    if len(devices) == 1:
        return devices[0]
    if level == len(LEVELS) - 1:
        return Group(LEVELS[level], tuple(devices))
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for device in devices:
        groups[topology.places[device][level]].append(device)
    parts = [_tree(topology, group, level + 1) for group in groups.values()]
    return parts[0] if len(parts) == 1 else Group(LEVELS[level], tuple(parts))


_Affinities = Mapping[int, Mapping[int, int]]


def _cut(parts: Mapping[int, Part], affinities: _Affinities) -> Part:
    """One part of these, each under the number of one of its devices, which stands for all of them."""
    items = list(parts)
    if len(items) == 1:
        return parts[items[0]]
    counts = Counter(affinities[one][other] for one, other in combinations(items, 2))
    for affinity in sorted(
        value for value, count in counts.items() if count >= len(items) - 1
    ):  # fewer cut no item off
        # what other values hold together, directly or by a chain, is one part: between two there is this value alone
        chains = _joined(items, partial(_is_other, affinities, affinity))
        if len(chains) > 1:
            return Group(affinity, tuple(_cut({item: parts[item] for item in chain}, affinities) for chain in chains))
    twins = _twins(items, affinities)
    if len(twins) == len(items):
        rows = tuple(tuple(affinities[one][other] for other in items) for one in items)
        return Web(rows, tuple(parts.values()))
    return _cut({alike[0]: _cut({item: parts[item] for item in alike}, affinities) for alike in twins}, affinities)


def _is_other(affinities: _Affinities, affinity: int, one: int, other: int) -> bool:
    return affinities[one][other] != affinity


def _twins(items: Sequence[int], affinities: _Affinities) -> list[list[int]]:
    """Those together that are worth the same to everybody else; they are then all worth the same to each other."""
    values = {one: sorted(affinities[one][other] for other in items if other != one) for one in items}

    def alike(one: int, other: int) -> bool:
        mine, its = affinities[one], affinities[other]
        return values[one] == values[other] and all(mine[it] == its[it] for it in items if it not in (one, other))

    return _joined(items, alike)


def _joined(items: Iterable[int], joined: Callable[[int, int], bool]) -> list[list[int]]:
    """The items that belong together, directly or through others; in their order."""
    left, found = list(items), []
    while left:
        chain = [left.pop(0)]
        for item in chain:
            near = [other for other in left if joined(item, other)]
            chain += near
            left = [other for other in left if other not in near]
        found.append(sorted(chain))
    return found
