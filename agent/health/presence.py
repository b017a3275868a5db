"""Tracks which hardware is there, and which was offered, went away and came back: a loose card does that over and over.

Only what can be pulled out is minded, by the names that backends give it: what a driver makes of it (`rdma:`, `mig:`,
`node:`) goes and comes with the driver. It has gone when no device of any backend has it any more, usable or not, so that
rebinding a driver makes no difference; it is back when a device that can be used has it again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct

from agent.health.flapping import WINDOW
from agent.health.measured_values import Source
from backends.base import Device

PLUGGED: Final = ("pci:", "usb:")
"""What the names of hardware begin with that can be pulled out."""


class _Gone(Struct, frozen=True):
    since: float
    identities: frozenset[str]
    """As it was offered last."""


class Presence:
    """Where each piece of hardware is seen, and what has gone."""

    def __init__(self) -> None:
        self._seen: dict[
            Source, dict[str, frozenset[str] | None]
        ] = {}  # its identities; None: no device of it can be used
        self._places: defaultdict[str, set[Source]] = defaultdict(set)
        self._offered: dict[str, frozenset[str]] = {}  # of what is there and was to be had: its identities then
        self._gone: dict[str, _Gone] = {}

    def forget(self, backend: str) -> None:
        """Another instance of the backend looks from now on: what it does not show may be what it is not to look for.

        So such hardware does not count as gone, if no other backend shows it.
        """
        for names in [names for source, names in self._seen.items() if source[0] == backend]:
            for name in names:
                if all(place[0] == backend for place in self._places[name]):
                    self._offered.pop(name, None)

    def found(
        self,
        backend: str,
        units: Mapping[str, Iterable[Device]],
        beside: Mapping[str, Iterable[Device]],
        now: float,
        excused: Callable[[str], bool],
    ) -> list[str]:
        """These units hold exactly these devices, and `beside` them those that cannot be used; returns what is back.

        Another card in its place is not it back; nor is what moved in no time, or was away for longer than a `WINDOW`.

        Args:
            backend: which.
            units: with their devices.
            beside: the same.
            now: monotonic seconds.
            excused: may this hardware go and come, as far as is known?
        """
        concerned: set[str] = set()
        for unit, devices in units.items():
            source = backend, unit
            before, seen = self._seen.pop(source, {}), _seen(devices, beside.get(unit, ()))
            for name in before.keys() - seen.keys():
                self._places[name].discard(source)
                if not self._places[name]:
                    del self._places[name]
            for name in seen:
                self._places[name].add(source)
            if seen:
                self._seen[source] = seen
            concerned |= before.keys() | seen.keys()
        self._gone = {name: gone for name, gone in self._gone.items() if now - gone.since <= WINDOW}
        return [name for name in sorted(concerned) if self._is_back(name, now, excused)]

    def _is_back(self, name: str, now: float, excused: Callable[[str], bool]) -> bool:
        if name not in self._places:
            was = self._offered.pop(name, None)
            if was is not None and not excused(name):
                self._gone[name] = _Gone(now, was)
            return False
        sights = [seen for source in self._places[name] if (seen := self._seen[source][name]) is not None]
        if not sights:
            return False
        identities = self._offered[name] = frozenset[str]().union(*sights)
        gone = self._gone.pop(name, None)
        if gone is None or gone.since == now or excused(name):
            return False
        return not (gone.identities and identities) or not gone.identities.isdisjoint(identities)


def _seen(devices: Iterable[Device], beside: Iterable[Device]) -> dict[str, frozenset[str] | None]:
    """The hardware of these that can be pulled out, with the identities of the devices that can be had."""
    seen: dict[str, frozenset[str] | None] = {}
    for device in beside:
        seen.update((name, None) for name in device.hardware if name.startswith(PLUGGED))
    for device in devices:
        for name in device.hardware | device.depends:
            if name.startswith(PLUGGED):
                known = seen.setdefault(name, None)
                if not device.unusable:
                    told = {device.identity} if device.identity and name in device.hardware else ()
                    seen[name] = (known or frozenset()).union(told)
    return seen
