"""Chooses the free devices that a pod should get: nearest to each other, leaving the rest whole; pure.

The kubelet names what is free, what must be among it and how many it wants (GetPreferredAllocation). What counts, each
only among choices that are equal in all before it:

1. **Health.** Healthy before degraded, degraded before unhealthy, unhealthy before what is not known at all.
2. **Sharing**, where a device has several IDs (`replicas`). `spread`: as few pairs of IDs of one device as can be; then the
   free IDs that are left as even as can be (the least sum of squares). `pack`: these as uneven as can be.
3. **Links** (NVLink, XGMI), where the container has other resources: without them they count within 5.
4. **Company**: how many devices have a device of the container's other resources near them that is their own (`Admission`),
   the nearest first. A device whose container has none yet should be near those that are free and are often asked for with it.
5. **Affinity**: the sum over all pairs of what they are worth to each other (`affinity`).
6. **The rest**: as little affinity as can be is cut between what is chosen and what stays free. The smallest group that is
   large enough is used up, and the free devices that remain are near to each other.
7. **Beside others**: as much affinity as can be to what is not free; a group that is in use already is broken, not a whole one.

Ties are broken by the devices' order on the bus.

A kubelet asks for one resource of one container at a time and names neither pod nor container. But it admits one
container after the other, asks for each of its resources once, in any order, without doing anything else in between, and
writes its checkpoint when it has all of them (`ManagerImpl.allocateContainerResources`). So what is asked for goes with
what was given just before, unless its resource was among that, or the checkpoint was written since (`Admission`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Final

from msgspec import Struct

from agent.model import Slot, State
from agent.placement.affinity import SAME, Company, Quota, Topology, clusters, survey
from agent.placement.subsets import Member, best
from backends.base import Device, Link, Placement

_RANKS: Final = {State.HEALTHY: 0, State.DEGRADED: 1, State.UNHEALTHY: 2}
_UNKNOWN: Final = 3

LONGEST: Final = 1.0
"""Seconds between an answer and the kubelet's next question about the same container, which takes it some ms.

A container that it gives up between two resources ends without a checkpoint: the time ends it.
"""

Given = Mapping[str, Sequence[Device]]
"""What a container has, by resource."""


def choose(
    slots: Mapping[str, Slot],
    links: Iterable[Link],
    placement: Placement,
    available: Iterable[str],
    must_include: Iterable[str],
    size: int,
    company: Sequence[Company] = (),
) -> tuple[str, ...]:
    """The best of the available IDs: `size` of them, or as many as there are, each once; never an error.

    Args:
        slots: the resource's, by their IDs.
        links: between its devices.
        placement: what to do where devices are shared.
        available: the IDs that are free. Unknown ones are chosen last.
        must_include: these come first, available or not, as far as `size` goes.
        size: how many in all; nothing is chosen where it is not above 0.
        company: devices of other resources, each resource by itself.
    """
    available = set(available)
    chosen = list(dict.fromkeys(must_include))[: max(size, 0)]
    for rank, alike in _ranked(slots, available.difference(chosen)):
        if (wanted := size - len(chosen)) <= 0:
            break
        if len(alike) > wanted and rank != _UNKNOWN:
            free = {device_id for device_id in available if device_id in slots and slots[device_id].health.offered}
            alike = _Choice.among(slots, links, free.difference(chosen), chosen, company, size).best(
                alike, placement, wanted
            )
        chosen += alike[:wanted]
    return tuple(chosen)


def _ranked(slots: Mapping[str, Slot], ids: Iterable[str]) -> list[tuple[int, list[str]]]:
    """The IDs by their health, the best rank first; each rank in order."""
    ranks: defaultdict[int, list[str]] = defaultdict(list)
    for device_id in sorted(ids):
        slot = slots.get(device_id)
        ranks[_UNKNOWN if slot is None or slot.device is None else _RANKS[slot.health.state]].append(device_id)
    return sorted(ranks.items())


class _Choice(Struct, frozen=True):
    """A resource's devices by their order on the bus, and what each has."""

    device_of: Mapping[str, int]
    """ID → device, of all IDs that have one."""
    topology: Topology
    free: Sequence[int]
    """How many of its slots are free."""
    taken: Sequence[int]
    """How many are chosen already."""
    others: Sequence[int]
    """How many others it has: held by pods, or unhealthy."""
    quotas: Sequence[Quota]
    """What is to be had of other resources."""

    @property
    def every(self) -> int:
        """How many slots there are."""
        return sum(self.free) + sum(self.taken) + sum(self.others)

    @classmethod
    def among(
        cls,
        slots: Mapping[str, Slot],
        links: Iterable[Link],
        free: Set[str],
        taken: Iterable[str],
        company: Iterable[Company],
        size: int,
    ) -> _Choice:
        """What there is to choose `size` from, those taken included."""
        found = {(device.unit, device.key): device for slot in slots.values() if (device := slot.device) is not None}
        devices = sorted(found.values(), key=lambda device: (device.ancestry, device.key))
        numbers = {(device.unit, device.key): number for number, device in enumerate(devices)}
        device_of = {
            device_id: numbers[slot.device.unit, slot.device.key]
            for device_id, slot in slots.items()
            if slot.device is not None
        }

        def count(ids: Iterable[str]) -> list[int]:
            counts = Counter(device_of[device_id] for device_id in ids if device_id in device_of)
            return [counts[device] for device in range(len(devices))]

        taken = frozenset(taken)
        others = device_of.keys() - free - taken
        topology, quotas = survey(devices, links, company, size)
        return cls(device_of, topology, count(free), count(taken), count(others), quotas)

    def best(self, ids: Iterable[str], placement: Placement, size: int) -> list[str]:
        """The best so many of these IDs, in order."""
        ids_of: defaultdict[int, list[str]] = defaultdict(list)
        for device_id in ids:
            ids_of[self.device_of[device_id]].append(device_id)
        worth = _Worth.of(self, placement)
        members = worth.members({device: len(own) for device, own in ids_of.items()})
        part = clusters(self.topology, sorted(ids_of))
        numbers = best(part, members, worth.affinity, size, self._gains(frozenset(ids_of), size, worth.affinity))
        return sorted(device_id for device, number in numbers.items() for device_id in ids_of[device][:number])

    def _gains(self, devices: frozenset[int], size: int, worth: int) -> Mapping[frozenset[int], Sequence[int]]:
        """Devices → what none, one, two ... of their slots add by what they find of other resources."""
        gains: dict[frozenset[int], list[int]] = {}
        for quota in self.quotas:
            taken = sum(self.taken[device] for device in quota.members)
            found = gains.setdefault(quota.members & devices, [0] * (size + 1))
            for number in range(size + 1):
                found[number] += worth * (quota.worth(taken + number) - quota.worth(taken))
        return gains


class _Worth(Struct, frozen=True):
    """All that counts as one number: what counts more is multiplied by more than all that counts less can add up to."""

    choice: _Choice
    placement: Placement | None
    """None where no device has two IDs."""
    to_taken: Sequence[int]
    to_free: Sequence[int]
    to_others: Sequence[int]
    step: int
    """More than the sum of the last can be, and of the last but one."""

    @classmethod
    def of(cls, choice: _Choice, placement: Placement) -> _Worth:
        free = [free + taken for free, taken in zip(choice.free, choice.taken, strict=True)]
        to_taken, to_free, to_others = map(choice.topology.towards, (choice.taken, free, choice.others))
        # as many are chosen whatever is chosen: only the differences count, and small numbers are faster
        to_free, to_others = map(_above_least, (to_free, to_others))
        step = 2 * choice.every * max(*to_free, *to_others) + 1
        shared = placement if choice.every > len(free) else None
        return cls(choice, shared, to_taken, to_free, to_others, step)

    @property
    def affinity(self) -> int:
        """Of one unit of affinity."""
        return self.step**2

    @property
    def sharing(self) -> int:
        """More than any sum of affinities, or of squares, can be."""
        topology = self.choice.topology
        linked = max((weight for linked in topology.links.values() for weight in linked.values()), default=0)
        # all that is to be had of other resources is less than one `link`
        return 2 * self.choice.every**2 * (SAME + topology.link * (linked + 1)) + 1

    def members(self, rooms: Mapping[int, int]) -> dict[int, Member]:
        """The devices of which so many slots can be taken.

        Between what is chosen and what stays free lies the affinity of the chosen ones to all of these, less that among
        the chosen ones, which is as much as can be already: a sum over the chosen, as all else that is no matter of pairs.
        """
        sharing, members = self.sharing, {}
        for device, room in rooms.items():
            single, pair = self._shared(device, sharing)
            single = (single * sharing + self.to_taken[device]) * self.affinity
            single += self.to_others[device] - self.to_free[device] * self.step
            members[device] = Member(room, single, (pair * sharing + SAME) * self.affinity)
        return members

    def _shared(self, device: int, sharing: int) -> tuple[int, int]:
        """Of one slot, and of two of this device together.

        If x of f free slots are taken, the square of the rest is f^2 + (1 - 2f) x + 2 (x (x - 1) / 2).
        """
        if self.placement is None:
            return 0, 0
        single, pair = 1 - 2 * self.choice.free[device], 2
        if self.placement == "pack":
            return single, pair
        return -self.choice.taken[device] * sharing - single, -sharing - pair


def _above_least(numbers: Sequence[int]) -> list[int]:
    least = min(numbers)
    return [number - least for number in numbers]


# --- the container under way ---


class Admission:
    """The container under way."""

    def __init__(
        self, written: Callable[[], object | None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`written` tells one writing of the kubelet's checkpoint from another; None: each question stands alone."""
        self._written = written
        self._clock = clock
        self._given: Given = {}
        self._version: object | None = None
        self._at = 0.0

    def so_far(self, resource: str) -> Given:
        """What the container that asks for this resource has of others; nothing where it may be another container."""
        given = self._given
        if not given or resource in given or self._version is None or self._clock() - self._at > LONGEST:
            return {}
        return given if self._written() == self._version else {}

    def take(self, resource: str) -> Given:
        """The same, and forget it: it is over unless the container gets what it asks for, and `given` is told."""
        found, self._given = self.so_far(resource), {}
        return found

    def given(self, devices: Given) -> None:
        """The container under way has all this by now."""
        self._given, self._version, self._at = devices, self._written(), self._clock()
