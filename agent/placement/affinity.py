"""Rates how near devices are to each other, and groups those among which all pairs are worth the same.

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
Where one device has several IDs, two of them are worth 10,000: nothing is nearer than the device itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise, product
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


class Topology(Struct, frozen=True):
    """Where devices are, and their links; a device is its number in the order in which they were given."""

    places: tuple[Place, ...]
    links: Mapping[int, Mapping[int, int]]
    """Device → device → the weight of what links them; both ways."""

    def affinity(self, one: int, other: int) -> int:
        """What the pair is worth."""
        if one == other:
            return SAME
        shared = sum(map(eq, self.places[one], self.places[other]))
        return LEVELS[shared] + LINK * self.links.get(one, {}).get(other, 0)

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
                worth += LINK * sum(weight * slots[other] for other, weight in linked.items())
            found.append(worth)
        return found


def survey(devices: Sequence[Device], links: Iterable[Link]) -> Topology:
    """The topology of these devices; links to others, to themselves or of no weight are passed over."""
    return Topology(_places(devices), _links(devices, links))


def towards_others(devices: Sequence[Device], others: Sequence[Device]) -> Sequence[int]:
    """For each device what all pairs with devices of other resources are worth, between which there are no links.

    They are looked at apart, so that what others tell of a bridge changes nothing among the devices themselves.
    """
    if not others:
        return [0] * len(devices)
    both = Topology(_places([*devices, *others]), {})
    return both.towards([0] * len(devices) + [1] * len(others))[: len(devices)]


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
