"""Finds the devices that a resource is meant to have and no pod can get, and remembers those that were offered and are gone.

That a node offers seven GPUs and not eight has to have a reason that somebody is told. A device that no resource selects,
or that another resource offers, is not missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agent.inventory.found_devices import Found
from agent.inventory.inventory import Inventory
from agent.runtime.chunked_work import in_batches
from backends.base import Device, Resource

UNUSABLE: Final = "unusable"
"""It is there, and cannot be used."""

FULL: Final = "list-full"
"""The resource's list has no room for it."""

TAKEN: Final = "conflict"
"""Another device has one of its IDs."""

WENT: Final = "gone"
"""It was offered, and is not there any more."""

REASONS: Final = (UNUSABLE, FULL, TAKEN, WENT)

_REMEMBERED: Final = 86400.0
"""Seconds for which what is gone is missing: what was pulled out for good is nobody's loss for ever."""

_MOST_GONE: Final = 1000
"""Devices; the first that went are forgotten before the others."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A device that a resource is meant to have and no pod can get."""

    resource: str
    """Or template."""
    backend: str
    reason: str
    """One of `REASONS`."""
    message: str
    """One sentence for a person."""
    seen: Device = field(compare=False)
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


def found_missing(inventory: Inventory) -> Iterator[Missing]:
    """The devices that are there and missing; what is built for several resources once for each."""
    return (it for found, full in inventory.without_place() if (it := _missing(found, full, inventory)) is not None)


def _missing(found: Found, full: str, inventory: Inventory) -> Missing | None:
    device, backend = found.device, found.ref[0]
    if inventory.is_held(device.hardware) or _is_offered(inventory, device.hardware):
        return None  # what a pod holds is listed
    if device.unusable:
        resource, reason, message = _meant_for(device, inventory.selection.of_kind(backend)), UNUSABLE, device.unusable
    elif full:
        resource, reason, message = full, FULL, found.why
    else:
        resource, reason, message = next((it.resource for it in found.candidates), ""), TAKEN, found.why
    return Missing(resource, backend, reason, message, device) if resource else None


def _meant_for(device: Device, resources: Iterable[Resource[Any]]) -> str:
    """The first resource that might take it; empty if none. A template that could not name it comes after the others."""
    meant = [it for it in resources if device.resource in (None, it.name) and it.might_take(device)]
    named = (it for it in meant if all(device.attributes.get(name) for name in it.named_by))
    return next((it.name for it in (*named, *meant)), "")


def _is_offered(inventory: Inventory, hardware: Iterable[str]) -> bool:
    """Is it, through another device: a part of it, one that is built of it?"""
    return any(found.placed is not None for found in inventory.on(hardware, minding=True))


class Shortfall:
    """What is missing, and since when."""

    def __init__(self, inventory: Inventory, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing; `clock` tells seconds."""
        self._inventory = inventory
        self._clock = clock
        self._missing: dict[tuple[str, str], Missing] = {}  # by backend and key
        self._offered: dict[tuple[str, str], Found] = {}  # by resource and key, as they were last
        self._gone: dict[str, Device] = {}  # of these, what has gone, by hardware

    @property
    def missing(self) -> Iterable[Missing]:
        """All of it, as of the last look."""
        return self._missing.values()

    def of(self, backend: str, device: str) -> Missing | None:
        """The device of this key, if it is missing."""
        return self._missing.get((backend, device))

    def gone(self, hardware: Iterable[str]) -> Device | None:
        """The device that was offered, had any of this, and has gone, also if a pod holds it; as it was seen last."""
        return next((self._gone[name] for name in hardware if name in self._gone), None)

    async def look(self) -> tuple[list[Missing], list[Missing]]:
        """Look at what is missing now; what was not before, or for another reason, and what is offered again.

        With thousands of devices it takes several steps of the loop.
        """
        now, inventory = self._clock(), self._inventory
        missing: dict[tuple[str, str], Missing] = {}
        offered: dict[tuple[str, str], Found] = {}
        gone: dict[str, Device] = {}
        async for batch in in_batches(inventory.without_place()):
            for found, full in batch:
                if (one := _missing(found, full, inventory)) is not None:
                    at = one.backend, one.device
                    if at not in missing or inventory.selection.comes_before(one.resource, missing[at].resource):
                        missing[at] = self._dated(one, now)
        async for placed in in_batches(inventory.placed()):
            for found in placed:
                if found.placed is not None:
                    offered[found.placed.resource, found.device.key] = found
        async for went in in_batches([at for at in self._offered if at not in offered]):
            for place in went:
                if self._has_gone(place[0], found := self._offered[place]):
                    offered[place] = found
                    gone |= dict.fromkeys(found.device.hardware, found.device)
                    if not inventory.is_held(found.device.hardware):  # else it is listed as Unhealthy
                        one = Missing(place[0], found.ref[0], WENT, "it is not there any more", found.device)
                        missing[one.backend, one.device] = self._dated(one, now)
        self._forget(missing, offered, now)
        before, self._missing, self._offered, self._gone = self._missing, missing, offered, gone
        begun = [it for at, it in missing.items() if it is not before.get(at)]
        ended: list[Missing] = []
        async for over in in_batches([it for at, it in before.items() if at not in missing]):
            ended += [it for it in over if _is_offered(inventory, it.hardware)]
        return begun, ended

    def _has_gone(self, resource: str, it: Found) -> bool:
        """Is none of it there, in whatever form, though its resource is configured as it was?

        What was a part of a card that is there has been made into something else; what it shared with others, as a control
        node, tells nothing.
        """
        kind = self._inventory.selection.kind(resource)
        cards = (name for name in it.device.depends if name.startswith("pci:"))
        return kind == it.ref[0] and not self._inventory.on({*it.device.hardware, *cards}, minding=True)

    def _dated(self, one: Missing, now: float) -> Missing:
        before = self._missing.get((one.backend, one.device))
        if before is None or before.reason != one.reason:
            return replace(one, since=now)
        dated = replace(one, since=before.since)
        return before if before == dated and before.hardware == dated.hardware else dated

    @staticmethod
    def _forget(missing: dict[tuple[str, str], Missing], offered: dict[tuple[str, str], Found], now: float) -> None:
        gone = sorted((it for it in missing.values() if it.reason == WENT), key=lambda it: it.since)
        for n, it in enumerate(gone):
            if n < len(gone) - _MOST_GONE or now - it.since > _REMEMBERED:
                del missing[it.backend, it.device], offered[it.resource, it.device]
