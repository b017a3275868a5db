"""Rates how near devices are to each other, and cuts them into nested groups, among whose members all pairs are worth the same.

A pair of devices has the value of the smallest thing that they share. The numbers are those of NVIDIA's go-gpuallocator
(`calculateGPUPairScore`), so that a node whose plugin is replaced goes on choosing as it did; what `nvidia-smi topo -m`
calls each is in brackets:

    10  nothing (SYS)
    20  the NUMA node (NODE)
    30  the PCI host bridge (PHB)
    40  the root port, with several bridges in between (PXB)
    50  the PCIe switch, each at a port of its own (PIX)
    60  the board: the same port, as functions of one card do

Each link between the two (NVLink, XGMI) adds 100 times its weight: one link is worth more than any way through PCIe.
Devices of different resources have no links; what a device has near it of another resource is counted by `Company`.
Where one device has several IDs, two of them are worth 10,000: nothing is nearer than the device itself.

By groups the best choice is found group by group and not among all subsets. What a group's members are worth to a device
outside must not depend on the member: then only how many are taken of each group matters to the others. PCI alone makes a tree
of such groups. With links they have to be looked for; what cannot be cut, such as the cube mesh of a DGX-1, stays a `Web`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise, product
from operator import eq, mul
from typing import Final

from msgspec import Struct

from backends.base import Device, Link

LEVELS: Final = (10, 20, 30, 40, 50, 60)
"""Worth of a pair by how many of the nested groups of a `Place` they share."""
_RISES: Final = tuple(narrow - wide for wide, narrow in pairwise(LEVELS))
LINK: Final = 100
SAME: Final = 10_000

Place = tuple[int, ...]
"""The groups that a device is in, from the widest: NUMA node, host bridge, root port, switch, board."""

LINKED_MOST: Final = 128
"""Devices whose links are taken into account: all their pairs are looked at. A node has 16 GPUs, 64 with partitions."""


class Topology(Struct, frozen=True):
    """Where devices are, and their links; a device is its number in the order in which they were given."""

    places: tuple[Place, ...]
    links: Mapping[int, Mapping[int, int]]
    """Device → device → the weight of what links them; both ways."""
    link: int = LINK
    """What each unit of such a weight is worth."""

    def affinity(self, one: int, other: int) -> int:
        """What the pair is worth."""
        if one == other:
            return SAME
        shared = sum(map(eq, self.places[one], self.places[other]))
        return LEVELS[shared] + self.link * self.links.get(one, {}).get(other, 0)

    def towards(self, slots: Sequence[int]) -> list[int]:
        """For each device the worth of all pairs that one slot of it makes with so many slots of each device."""
        if not any(slots):
            return [0] * len(slots)
        counts: defaultdict[int, int] = defaultdict(int)
        for place, number in zip(self.places, slots, strict=True):
            for group in place:
                counts[group] += number
        found, total = [], LEVELS[0] * sum(slots)
        for device, (place, own) in enumerate(zip(self.places, slots, strict=True)):
            worth = total + sum(map(mul, _RISES, map(counts.__getitem__, place))) + (SAME - LEVELS[-1]) * own
            if linked := self.links.get(device):
                worth += self.link * sum(weight * slots[other] for other, weight in linked.items())
            found.append(worth)
        return found


class Company(Struct, frozen=True):
    """Devices of another resource, each of which a chosen device should have beside it: a GPU its own adapter."""

    devices: Sequence[Device]
    given: bool = True
    """Whether the container has them. Else they are free, and it may ask for some of them next."""


class Quota(Struct, frozen=True):
    """Of how many of the devices below one bridge each finds a device of the company there, one that is its own."""

    members: frozenset[int]
    """The devices below the bridge, or on the NUMA node."""
    rise: int
    """What such a pair is worth more than one that shares only what is above, in units of affinity."""
    room: int
    """The most pairs that the company's devices here can make."""
    each: int
    """The most that a device can make: more than one where the company has more devices than are chosen."""

    def worth(self, number: int) -> int:
        """Of so many of the members together.

        The best pairing makes as many pairs as it can below each bridge, then as many of what is left as it can above
        it: groups are nested, so that pairing what is near takes no pair from a wider group. So each group counts alone.
        """
        return self.rise * min(self.room, number * self.each)


def survey(
    devices: Sequence[Device], links: Iterable[Link], company: Iterable[Company] = (), size: int = 0
) -> tuple[Topology, list[Quota]]:
    """The topology of these devices, and what is to be had of devices of other resources where `size` are chosen.

    Links to others, to themselves or of no weight are passed over. A device's own neighbour is worth more than all ways
    through PCIe among the devices, and one link more than all of that, so that a mesh of GPUs is not left for an adapter.
    """
    company = list(company)
    unit = SAME * size**2 + 1
    places = _places([*devices, *(device for each in company for device in each.devices)])
    own, first = places[: len(devices)], len(devices)
    quotas: list[Quota] = []
    for each in company:
        others, first = places[first : first + len(each.devices)], first + len(each.devices)
        quotas += _quotas(own, others, size, unit, given=each.given)
    best = sum(quota.worth(size) for quota in quotas)
    return Topology(own, _links(devices, links), LINK + best + unit if quotas else LINK), quotas


def _quotas(own: Sequence[Place], others: Sequence[Place], size: int, unit: int, *, given: bool) -> Iterator[Quota]:
    """One for each group that has any of both."""
    there = Counter(group for place in others for group in place)
    members: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for number, place in enumerate(own):
        for level, group in enumerate(place):
            if there[group]:
                members[level, group].add(number)
    # where the container has two GPUs and gets four adapters each GPU has two; of what it may not ask for, one each
    share, each = (-(-size // len(others)), -(-len(others) // size)) if given and others and size else (1, 1)
    for (level, group), found in members.items():
        yield Quota(frozenset(found), _RISES[level] * unit, there[group] * share, each)


def _links(devices: Sequence[Device], links: Iterable[Link]) -> Mapping[int, Mapping[int, int]]:
    """A pair that is named twice, by either of its devices say, counts once, with the greater weight.

    A link is between hardware: all devices that own or depend on one end, the parts of a GPU say, have it.
    """
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for number, device in enumerate(devices):
        for name in device.hardware | device.depends:
            numbers[name].append(number)
    found: defaultdict[int, dict[int, int]] = defaultdict(dict)
    for link in links:
        for one, other in product(numbers.get(link.one, ()), numbers.get(link.other, ())):
            if one != other and link.weight > 0:
                weight = max(link.weight, found[one].get(other, 0))
                found[one][other] = found[other][one] = weight
    return found


def _places(devices: Sequence[Device]) -> tuple[Place, ...]:
    numa_nodes: dict[str, int] = {}
    for device in devices:  # a bridge has one node; of garbage, the lowest
        if device.ancestry and device.numa_node is not None:
            bridge = device.ancestry[0]
            numa_nodes[bridge] = min(device.numa_node, numa_nodes.get(bridge, device.numa_node))
    numbers: dict[tuple[int, Hashable], int] = {}
    places = []
    for number, device in enumerate(devices):
        place, group = [], -1
        for name in _groups(device, ("alone", number), numa_nodes):
            group = numbers.setdefault((group, name), len(numbers))
            place.append(group)
        places.append(tuple(place))
    return tuple(places)


def _groups(device: Device, alone: Hashable, numa_nodes: Mapping[str, int]) -> tuple[Hashable, ...]:
    """The names of its groups, from the widest; `alone` is one that no other device shares.

    `Device.ancestry` is the host bridge, the root port, the ports of switches. The last bridge leads to one slot. On the
    host bridge itself there are only root ports and what is built in, so that it makes no board.
    """
    above = device.ancestry
    if not above:
        return alone if device.numa_node is None else device.numa_node, alone, alone, alone, alone
    bridge = above[0]
    numa_node = numa_nodes.get(bridge, bridge)
    if len(above) == 1:
        return numa_node, bridge, alone, alone, alone
    return numa_node, bridge, above[1], above[:-1], above


# --- clusters ---


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
    """Those together that are worth the same to all others; they are then all worth the same to each other."""
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
