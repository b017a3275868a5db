"""Finds the hardware that no pod can get, and remembers what was offered and is gone.

Operators are told why a node offers seven GPUs and not eight, once for each piece of hardware. What a resource is meant
to have is missing; what no resource selects is only shown. A selector or template that matches nothing is told with what is
there instead.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from functools import reduce
from itertools import islice
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from agent.inventory.inventory import Inventory
from agent.inventory.lookup import Place
from agent.inventory.ownership import piece
from agent.inventory.selection import Found
from agent.runtime.pacing import SYSTEM, Clock
from agent.runtime.workers import in_batches
from backends.base import Device, HostPath, Node, Problem, Resource, Selector

UNUSABLE: Final = "unusable"
"""It is there, and cannot be used."""

FULL: Final = "list-full"
"""The resource's list has no room for it."""

TAKEN: Final = "conflict"
"""Another device has its hardware or one of its IDs, or a pod has it (`ownership.assign`)."""

WENT: Final = "gone"
"""It was offered, is not there any more, and no pod holds it: of one that a pod holds, `ownership.HELD_AND_GONE` says so."""

REASONS: Final = (UNUSABLE, FULL, TAKEN, WENT)

_IS_GONE: Final = "it is not there any more"

_KNOWN_BY: Final = ("model", "vendor", "device", "profile", "minor", "gi", "ci", "hca", "ifname", "name")
"""Attributes of which people's names for devices are made (`agent.inventory.lookup`)."""

_MOST_NAMES: Final = 8
"""IDs, and paths of nodes, of one device that are kept: one with a thousand tokens is asked for by its key."""

_REMEMBERED: Final = 86400.0
"""Seconds for which what is gone is missing: after that it counts as pulled out for good."""

_MOST_GONE: Final = 1000
"""Devices; the first that went are forgotten before the others."""


@dataclasses.dataclass(frozen=True, slots=True)  # noqa: TID251  # it compares by some of its fields
class Missing:
    """A device that a resource is meant to have and no pod can get."""

    resource: str
    """Or template."""
    backend: str
    reason: str
    """One of `REASONS`."""
    message: str
    """One sentence for a person."""
    seen: Device = dataclasses.field(compare=False)
    """As it was seen last."""
    since: float = 0.0
    """Monotonic seconds."""

    @property
    def device(self) -> str:
        """Its key."""
        return self.seen.key

    @property
    def hardware(self) -> frozenset[str]:
        """What it owns, or owned."""
        return self.seen.hardware


class Offered(Struct, frozen=True, gc=False):
    """A device as it was when it was offered last; kept over restarts, in which hardware may get lost."""

    resource: str
    device: str
    backend: str
    hardware: frozenset[str]
    depends: frozenset[str] = frozenset()
    numa_node: int | None = None
    ancestry: tuple[str, ...] = ()
    attributes: Mapping[str, tuple[str, ...]] = {}
    """Those by which people know it."""
    went: float = 0.0
    """Seconds since the epoch; 0 while it is there."""
    ids: tuple[str, ...] = ()
    """The first of them."""
    nodes: tuple[str, ...] = ()
    """Paths of its nodes, the first of them."""

    def as_device(self) -> Device:
        """As it was seen last, as far as it is kept."""
        return Device(
            self.device,
            "",
            self.hardware,
            depends=self.depends,
            numa_node=self.numa_node,
            ancestry=self.ancestry,
            attributes=self.attributes,
            nodes=tuple(Node(HostPath(path), path, "rw") for path in self.nodes),
        )


class NotOffered(Struct, frozen=True, gc=False):
    """A piece of hardware that no pod can get: told once, however many devices are built of it."""

    found: Found
    """The device under whose key it is told."""
    why: str
    """One sentence for a person."""
    missing: Missing | None
    """None if no resource misses it: none selects it, or it is so by design."""


def departure(inventory: Inventory, device: Device) -> tuple[str, str]:
    """Why a device has left a list, in a word and a sentence."""
    there = inventory.on(piece(device))
    for found in there:
        if found.device.unusable:
            return UNUSABLE, found.device.unusable
        if found.placed is not None:
            return "elsewhere", f"{found.placed.resource} has it now"
    return ("unselected", there[0].why) if there else (WENT, _IS_GONE)


def not_offered(inventory: Inventory) -> list[NotOffered]:
    """What every face shows as not offered, each piece of hardware once.

    Not among it: what a resource offers, whole, in parts, or under its key in another backend; what a pod holds, which is
    listed; what cannot be used and no resource selects, such as another vendor's cards.
    """
    return each_once(candidates(inventory), inventory)


def candidates(inventory: Inventory) -> Iterator[NotOffered | None]:
    """What is to be told of each device that no resource has, one by one; None of most."""
    return (_told(found, full, inventory) for found, full in inventory.without_place())


def each_once(told: Iterable[NotOffered | None], inventory: Inventory) -> list[NotOffered]:
    """The same, each piece of hardware once, in order."""
    pieces: dict[frozenset[str], list[NotOffered]] = {}
    for one in told:
        if one is not None:
            pieces.setdefault(piece(one.found.device), []).append(one)
    return sorted((_together(same, inventory) for same in pieces.values()), key=lambda one: one.found.ref)


def _together(told: Sequence[NotOffered], inventory: Inventory) -> NotOffered:
    """One of several for the same hardware: what the first resource misses; else the first, with what is said of each."""
    if missed := [one for one in told if one.missing is not None]:
        return reduce(lambda one, other: other if _comes_before(other.missing, one.missing, inventory) else one, missed)
    whys = dict.fromkeys(one.why for one in sorted(told, key=lambda one: one.found.ref))
    return replace(min(told, key=lambda one: one.found.ref), why="; ".join(whys))


def _comes_before(one: Missing | None, other: Missing | None, inventory: Inventory) -> bool:
    return one is not None and other is not None and inventory.selection.comes_before(one.resource, other.resource)


def found_missing(inventory: Inventory) -> list[Missing]:
    """What is there and missing, each piece of hardware once, in the first resource that is meant to have it."""
    return [one.missing for one in not_offered(inventory) if one.missing is not None]


def _told(found: Found, full: str, inventory: Inventory) -> NotOffered | None:
    device, backend = found.device, found.backend
    if _is_offered(inventory, device) or (inventory.is_held(device.hardware) and not _has_owner(inventory, device)):
        return None  # what a pod holds is listed
    if device.unusable:
        resource, reason, message = _meant_for(device, inventory.selection.of_kind(backend)), UNUSABLE, device.unusable
        if not resource:
            return None
    elif full:
        resource, reason, message = full, FULL, found.why
    elif found.candidates:
        resource, reason, message = found.candidates[0].resource, TAKEN, found.why
    else:  # selectors may take it where the rest of a resource does not: its pre_start, or its name
        resource, reason, message = _selects(device, inventory.selection.of_kind(backend)), UNUSABLE, found.why
    is_missing = resource and not device.by_design
    return NotOffered(found, message, Missing(resource, backend, reason, message, device) if is_missing else None)


def _meant_for(device: Device, resources: Iterable[Resource[Any]]) -> str:
    """The first resource that might take it; empty if none. A template that could not name it comes after the others."""
    meant = [it for it in resources if device.resource in (None, it.name) and it.might_take(device)]
    named = (it for it in meant if all(device.attributes.get(name) for name in it.named_by))
    return next((it.name for it in (*named, *meant)), "")


def _selects(device: Device, resources: Iterable[Resource[Any]]) -> str:
    """The first resource whose selectors take it and that could name it; empty if none does."""
    meant = (it for it in resources if device.resource in (None, it.name) and it.refuses(device) is None)
    return next((it.name for it in meant if all(device.attributes.get(name) for name in it.named_by)), "")


def _is_offered(inventory: Inventory, device: Device) -> bool:
    """Whether a device's hardware is offered, as another device or in parts. What goes with another device is not."""
    mine = piece(device)
    placed = [it.device for it in inventory.on(mine, minding=True) if it.placed is not None]
    return any(not mine.isdisjoint(it.depends) for it in placed) or mine <= frozenset[str]().union(*map(piece, placed))


def _has_owner(inventory: Inventory, device: Device) -> bool:
    """Whether a device that is offered owns it."""
    return any(it.placed is not None for it in inventory.on(piece(device)))


class Shortfall:
    """What is missing, and since when."""

    def __init__(
        self,
        inventory: Inventory,
        clock: Clock = SYSTEM,
    ) -> None:
        """Begin with nothing."""
        self._inventory = inventory
        self._clock, self._wall = clock.now, clock.wall
        self._missing: dict[tuple[str, str], Missing] = {}  # by backend and key
        self._offered: dict[tuple[str, str], Offered] = {}  # by resource and key, as they were last
        self._seen: dict[tuple[str, str], Device] = {}  # the same
        self._gone_by_hardware: dict[str, Device] = {}  # of these, what has gone, by hardware
        self._moved: set[str] = set()  # backends whose hardware may have other addresses since `restore`
        self._earlier: Set[tuple[str, str]] = frozenset()  # what was restored
        self._restored: set[tuple[str, str]] = set()  # of the offered, what has not been there in this run
        self.former: Sequence[Place] = ()
        """What was offered and is not, as it was called then: gone, or there and of no use."""
        self.revision = 0
        """Raised whenever a look changes `offered`."""

    def restore(self, offered: Iterable[Offered], *, another_boot: bool) -> None:
        """Take in what an earlier run of ours had offered, perhaps before a reboot."""
        earlier = {(it.resource, it.device): it for it in offered}
        self._restored |= earlier.keys() - self._offered.keys()
        self._offered = earlier | self._offered
        if another_boot:
            self._earlier, self._moved = earlier.keys(), {it.backend for it in earlier.values()}

    @property
    def offered(self) -> Collection[Offered]:
        """What is to be kept for the next run: all that is offered, and what is gone."""
        return self._offered.values()

    @property
    def missing(self) -> Iterable[Missing]:
        """All of it, as of the last look."""
        return self._missing.values()

    def of(self, backend: str, device: str) -> Missing | None:
        """The device of this key, if it is missing."""
        return self._missing.get((backend, device))

    def gone(self, hardware: Iterable[str]) -> Device | None:
        """The device that was offered, had any of this, and has gone, also if a pod holds it; as it was seen last."""
        return next((self._gone_by_hardware[name] for name in hardware if name in self._gone_by_hardware), None)

    def awaits(self, backend: str) -> bool:
        """Whether there is a device of this backend that an earlier run offered last, and that is not there."""
        kept = (it for it in self._offered.values() if it.backend == backend and not it.went)
        return any(not self._inventory.on(it.hardware) for it in kept if self._inventory.kind(it.resource) == backend)

    async def look(self, looked: Container[str]) -> tuple[list[Missing], list[Missing]]:
        """Look at what is missing now; what was not before, or for another reason, and what is offered again.

        What has just gone from a list is not among the former: it has been told. With thousands of devices it takes
        several steps of the loop.

        Args:
            looked: the backends that have looked at all their hardware: what others do not show may be there.
        """
        now, inventory = self._clock(), self._inventory
        told: list[NotOffered | None] = []
        async for batch in in_batches(candidates(inventory)):
            told += batch
        missing: dict[tuple[str, str], Missing] = {}
        for one in (it.missing for it in each_once(told, inventory) if it.missing is not None):
            at = one.backend, one.device
            if at not in missing or _comes_before(one, missing[at], inventory):
                missing[at] = self._dated(one, now)
        offered: dict[tuple[str, str], Offered] = {}
        seen: dict[tuple[str, str], Device] = {}
        gone_by_hardware: dict[str, Device] = {}
        former: list[Place] = []
        every = [found for name in inventory.names() for found in inventory.placed_in(name)]
        async for placed in in_batches(every):
            for found in placed:
                if found.placed is not None:
                    place = found.placed.resource, found.device.key
                    offered[place], seen[place] = self._as_offered(place, found), found.device
        self._restored -= offered.keys()
        lost = self._lost(offered.keys(), missing, looked)
        there = frozenset[str]().union(*(it.hardware for it in missing.values()))
        async for some in in_batches(lost):
            for it in filter(None, (self._lost_as(one, there, looked) for one in some)):
                place = it.resource, it.device
                offered[place], seen[place] = it, self._seen.get(place) or it.as_device()
                former.append(Place(it.hardware, it.device, it.resource, it.ids, it.depends, seen[place]))
                if it.went and not self._may_be_there(it, looked) and (it.backend, it.device) not in missing:
                    gone_by_hardware |= dict.fromkeys(it.hardware, seen[place])
                    if not inventory.is_held(it.hardware):  # else it is listed as Unhealthy
                        missing[it.backend, it.device] = self._gone(it, seen[place], now)
        self._forget(missing, offered, now)
        if list(map(id, offered.values())) != list(map(id, self._offered.values())):
            self.revision += 1
        before, self._missing, self._offered = self._missing, missing, offered
        self._seen, self._gone_by_hardware, self.former = seen, gone_by_hardware, former
        begun = [it for at, it in missing.items() if it is not before.get(at) and not self._has_been_told(it)]
        ended: list[Missing] = []
        async for over in in_batches([it for at, it in before.items() if at not in missing]):
            ended += [it for it in over if _is_offered(inventory, it.seen)]
        return begun, ended

    def _lost(
        self,
        offered: Set[tuple[str, str]],
        missing: Mapping[tuple[str, str], Missing],
        looked: Container[str],
    ) -> list[Offered]:
        """What was offered and is not, as far as its backend can tell; without what has only changed."""
        lost = [it for at, it in self._offered.items() if at not in offered]
        if moved := {it for it in self._moved if it in looked}:
            # a card more in a machine gives all others new addresses: then as many have come as have gone
            came = offered | {(it.resource, it.device) for it in missing.values()}
            fresh = Counter(resource for resource, _ in came - self._earlier)
            gone = Counter(it.resource for it in lost)
            lost = [it for it in lost if it.backend not in moved or gone[it.resource] > fresh[it.resource]]
            self._moved -= moved
        return lost

    def _lost_as(self, lost: Offered, there: Set[str], looked: Container[str]) -> Offered | None:
        """What was offered and is not, with when it went; None if there is nothing to tell of it."""
        if self._inventory.kind(lost.resource) != lost.backend:
            return None  # it is configured no more
        if self._may_be_there(lost, looked) or not there.isdisjoint(lost.hardware):
            return lost
        if self._has_gone(lost):
            return lost if lost.went else replace(lost, went=self._wall())
        return None

    def _may_be_there(self, it: Offered, looked: Container[str]) -> bool:
        """Whether a device may be there, though it has not been seen in this run."""
        return (it.resource, it.device) in self._restored and it.backend not in looked

    def _as_offered(self, place: tuple[str, str], found: Found) -> Offered:
        """What is to be kept of a device that has this place; the same object where nothing has changed."""
        known, device = self._offered.get(place), found.device
        if known is not None and self._seen.get(place) is device:
            return known
        told = ((name, device.attributes[name]) for name in _KNOWN_BY if name in device.attributes)
        names = {name: values for name, values in told if all(map(str.isprintable, values))}  # else none can be written
        where = device.numa_node, device.ancestry
        ids, paths = found.placed.ids if found.placed else (), (node.path.text for node in device.nodes)
        called = (tuple(islice(filter(str.isprintable, it), _MOST_NAMES)) for it in (ids, paths))
        fresh = Offered(*place, found.backend, device.hardware, device.depends, *where, names, 0.0, *called)
        return known if known is not None and known == fresh else fresh

    def _gone(self, it: Offered, seen: Device, now: float) -> Missing:
        before = self._missing.get((it.backend, it.device))
        if before is not None and (before.reason, before.resource) == (WENT, it.resource):
            return before
        return Missing(it.resource, it.backend, WENT, _IS_GONE, seen, now - self._wall() + it.went)

    def _has_been_told(self, it: Missing) -> bool:
        """Whether the log has told that it went: only if it left a list of this run, not one of an earlier run."""
        return it.reason == WENT and (it.resource, it.device) not in self._restored

    def _has_gone(self, it: Offered) -> bool:
        """Whether none of it is there, in whatever form.

        What was a part of a card that is there has been made into something else; what it shared with others, as a control
        node, tells nothing.
        """
        cards = (name for name in it.depends if name.startswith("pci:"))
        return not self._inventory.on({*it.hardware, *cards}, minding=True)

    def _dated(self, one: Missing, now: float) -> Missing:
        before = self._missing.get((one.backend, one.device))
        if before is None or before.reason != one.reason:
            return dataclasses.replace(one, since=now)
        dated = dataclasses.replace(one, since=before.since)
        return before if before == dated and before.hardware == dated.hardware else dated

    @staticmethod
    def _forget(missing: dict[tuple[str, str], Missing], offered: dict[tuple[str, str], Offered], now: float) -> None:
        gone = sorted((it for it in missing.values() if it.reason == WENT), key=lambda it: it.since)
        for n, it in enumerate(gone):
            if n < len(gone) - _MOST_GONE or now - it.since > _REMEMBERED:
                del missing[it.backend, it.device]
                offered.pop((it.resource, it.device), None)


# --- selectors and templates that match nothing ---


_SHOWN: Final = 8  # values of an attribute in one sentence: a node has hundreds of addresses


def unmatched(resources: Iterable[Resource[Any]], found: Mapping[str, Sequence[Device]]) -> list[tuple[str, Problem]]:
    """Each with its backend.

    Args:
        resources: as configured.
        found: backend → all that could be selected; of a backend that is not there nothing is said.
    """
    return [
        (resource.spec.backend, Problem(resource.name, f"{resource.name}: {sentence}"))
        for resource in resources
        if (devices := [it for it in found.get(resource.spec.backend, ()) if it.resource in (None, resource.name)])
        for sentence in _sentences(resource, devices)
    ]


def _sentences(resource: Resource[Any], devices: Sequence[Device]) -> Iterator[str]:
    backend = resource.spec.backend
    attributes = sorted({name for device in devices for name in device.attributes})
    for name in resource.named_by:
        if name not in attributes and difflib.get_close_matches(name, attributes):  # else hardware may come that has it
            yield "it names nothing; " + _no_such(name, backend, attributes)
    for word, selectors in (("selector", resource.spec.select), ("exclude", resource.spec.exclude)):
        for selector in selectors:
            if strangers := [name for name in selector if name not in attributes]:
                yield f"its {word} {_written(selector)} matches nothing; " + _no_such(strangers[0], backend, attributes)
            elif word == "selector" and (why := _mismatch(selector, backend, devices)):
                yield f"its selector {_written(selector)} matches nothing; {why}"


def _no_such(name: str, backend: str, attributes: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, attributes, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    known = f"they have {', '.join(attributes)}" if attributes else "they have no attributes"
    return f"no device that the {backend} backend found has an attribute {name!r}{meant}; {known}"


def _mismatch(selector: Selector, backend: str, devices: Sequence[Device]) -> str | None:
    """Which attribute leaves no device of those that match the attributes before it, and what these have instead."""
    before: dict[str, tuple[str, ...]] = {}
    for name, wanted in selector.items():
        matching = [device for device in devices if _has(device, name, wanted)]
        if not matching:
            where = f" where {_written(before)}" if before else ""
            return f"the {backend} backend found {name} {_values(name, wanted, devices)}{where}"
        devices, before[name] = matching, wanted
    return None


def _has(device: Device, name: str, wanted: Sequence[str]) -> bool:
    """Whether an attribute of the device has a wanted value, as `Resource.refuses` compares them."""
    return not {value.lower() for value in wanted}.isdisjoint(
        value.lower() for value in device.attributes.get(name, ())
    )


def _values(name: str, wanted: Sequence[str], devices: Sequence[Device]) -> str:
    """The values there are, with the number of devices; the one that was probably meant comes first."""
    had = {(it.unit, it.key, value) for it in devices for value in it.attributes.get(name) or ("unknown",)}
    counts = Counter(value for _, _, value in had)  # a device may be built for several resources
    near = [value for want in wanted for value in difflib.get_close_matches(want, counts, n=1)]
    ordered = sorted(counts, key=lambda value: (value not in near, -counts[value], value))
    shown = ", ".join(f"{value} ({counts[value]})" for value in ordered[:_SHOWN])
    return shown + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")


def _written(selector: Selector) -> str:
    return " and ".join(f"{name} = {' or '.join(map(repr, wanted))}" for name, wanted in selector.items())
