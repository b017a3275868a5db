"""The best placement found by looking at every subset; written from the words of the docstrings, not from the code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations

from agent.model import Slot
from agent.placement.affinity import Company
from backends.base import Device, Link, Placement

_MOST = 1_000_000
"""More than all ways through PCIe among the devices of a test are worth."""

Key = tuple[int, ...]
"""What counts, the most important first; the greatest is the best."""


def level(one: Device, other: Device, devices: Iterable[Device]) -> int:
    """By the smallest thing that the two share."""
    a, b = one.ancestry, other.ancestry
    if a and b and a[0] == b[0]:
        if len(a) == 1 or len(b) == 1 or a[1] != b[1]:
            return 30
        if a == b:
            return 60
        return 50 if a[:-1] == b[:-1] else 40  # ports of the same switch
    mine, its = node(one, devices), node(other, devices)
    return 20 if mine is not None and mine == its else 10


def node(device: Device, devices: Iterable[Device]) -> int | None:
    """The NUMA node: of a host bridge, the lowest that is told by anything below it."""
    if not device.ancestry:
        return device.numa_node
    below = [it.numa_node for it in devices if it.ancestry[:1] == device.ancestry[:1] and it.numa_node is not None]
    return min(below, default=None)


class Exhaustive:
    """A resource whose subsets are judged one by one."""

    def __init__(
        self,
        slots: Mapping[str, Slot],
        links: Iterable[Link],
        placement: Placement,
        available: Collection[str],
        company: Sequence[Company] = (),
    ) -> None:
        self._placement = placement
        self._devices = {device_id: slot.device for device_id, slot in slots.items() if slot.device is not None}
        self._available = [device_id for device_id in available if device_id in self._devices]
        every = list({id(device): device for device in self._devices.values()}.values())
        weights: dict[frozenset[str], int] = {}
        for link in links:
            pair = frozenset((link.one, link.other))
            weights[pair] = max(link.weight, weights.get(pair, 0))
        everything = [*every, *(device for each in company for device in each.devices)]
        self._near = [
            {a: [level(one, other, everything) - 10 for other in each.devices] for a, one in self._devices.items()}
            for each in company
        ]
        self._given = [each.given for each in company]
        self._has_company = any(worth for near in self._near for of_one in near.values() for worth in of_one)
        linked = _MOST if self._has_company else 100
        pairs = {
            (id(a), id(b)): 10_000
            if a is b
            else level(a, b, everything) + linked * weights.get(frozenset((a.key, b.key)), 0)
            for a in every
            for b in every
        }
        self._affinity = {
            (a, b): pairs[id(one), id(other)] for a, one in self._devices.items() for b, other in self._devices.items()
        }
        self._shared = len(every) < len(self._devices)

    def key(self, chosen: Collection[str]) -> Key:
        """How good this choice is."""
        rest = [device_id for device_id in self._available if device_id not in chosen]
        others = self._devices.keys() - set(chosen) - set(rest)
        cut = sum(self._affinity[a, b] for a in chosen for b in rest)
        beside = sum(self._affinity[a, b] for a in chosen for b in others)
        inside = sum(self._affinity[pair] for pair in combinations(chosen, 2))
        if not self._has_company:
            return (*self._sharing(chosen, rest), inside, -cut, beside)
        return (*self.first(chosen), self._own(chosen), inside % _MOST, -cut, beside)

    def first(self, chosen: Collection[str]) -> Key:
        """What counts more than the container's other resources: how devices are shared, and their links."""
        rest = [device_id for device_id in self._available if device_id not in chosen]
        inside = sum(self._affinity[pair] for pair in combinations(chosen, 2))
        return (*self._sharing(chosen, rest), inside // _MOST)

    def _own(self, chosen: Collection[str]) -> int:
        """The most that pairs are worth which give each chosen slot a device of its own: of each resource by itself."""
        total = 0
        for near, given in zip(self._near, self._given, strict=True):
            others = len(next(iter(near.values()), ()))
            if not chosen or not others:
                continue
            share, each = (-(-len(chosen) // others), -(-others // len(chosen))) if given else (1, 1)
            places = [slot for slot in chosen for _ in range(each)]
            found = {0: 0}  # which places are taken → the most that those pairs are worth
            for other in (other for other in range(others) for _ in range(share)):
                more = dict(found)
                for places_taken, worth in found.items():
                    for number, slot in enumerate(places):
                        if not places_taken >> number & 1:
                            key, value = places_taken | 1 << number, worth + near[slot][other]
                            more[key] = max(value, more.get(key, 0))
                found = more
            total += max(found.values())
        return total

    def _sharing(self, chosen: Iterable[str], rest: Iterable[str]) -> Key:
        if not self._shared:
            return ()
        left = sum(count**2 for count in self._per_device(rest))
        if self._placement == "pack":
            return (left,)
        return -sum(count * (count - 1) // 2 for count in self._per_device(chosen)), -left

    def _per_device(self, ids: Iterable[str]) -> Iterable[int]:
        return Counter(id(self._devices[device_id]) for device_id in ids).values()

    def best(self, size: int, must_include: Sequence[str] = ()) -> Key:
        """The key of the best choice."""
        free = [device_id for device_id in self._available if device_id not in must_include]
        return max(self.key((*must_include, *more)) for more in combinations(free, size - len(must_include)))

    def best_of_each_size(self) -> list[Key]:
        """The same for all sizes, faster, where nothing is shared and nothing must be."""
        free, affinity = self._available, self._affinity
        to_free = {a: sum(affinity[a, b] for b in free if b != a) for a in free}
        beside = {a: sum(affinity[a, b] for b in self._devices.keys() - set(free)) for a in free}
        best: list[Key] = [()] * (len(free) + 1)

        def look(first: int, chosen: tuple[str, ...], inside: int, near_free: int, near_others: int) -> None:
            best[len(chosen)] = max(best[len(chosen)], (inside, 2 * inside - near_free, near_others))
            for number in range(first, len(free)):
                one = free[number]
                look(
                    number + 1,
                    (*chosen, one),
                    inside + sum(affinity[one, other] for other in chosen),
                    near_free + to_free[one],
                    near_others + beside[one],
                )

        look(0, (), 0, 0, 0)
        return best
