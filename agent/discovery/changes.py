"""Compares what a scan found with what was known: the changes, for inventory and health."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from msgspec import Struct, field
from msgspec.structs import replace

from agent.discovery.unit_walk import Look, Seen
from backends.base import Device, Link, Signal


class Changes(Struct, frozen=True):
    """What a scan or a probe of one backend found that differs from before."""

    backend: str
    units: Mapping[str, tuple[Device, ...]]
    """Units whose devices differ from before; an empty tuple is a unit that is gone."""
    signals: Mapping[str, tuple[Signal, ...]]
    """Every unit that was read, with all signals of its probes; none of a unit that is gone.
    A unit that was only probed is here if its signals differ from the last ones, or have a measure."""
    links: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)
    """Units whose links differ from before."""
    since: float | None = None
    """When, on the monotonic clock, the first hint came that led to this scan; None: a timer did."""
    by_reload: bool = False
    """These are the changes of a reload: another instance of the backend found this, or there is none any more."""
    beside: Mapping[str, tuple[Device, ...]] = field(default_factory=dict)
    """`Discovery.beside` of the units whose devices differ."""
    more: bool = False
    """More follows at once: what the scan found is too much for one step of the loop, and this is a part of it."""

    def in_parts(self, size: int) -> Iterator[Changes]:
        """Yield the same in parts of about `size` devices, at least one.

        Units that have devices come before those that have none any more: hardware that has moved from one unit to
        another has not been away.
        """
        parts: list[list[str]] = [[]]
        devices = 0
        for unit in sorted({**self.units, **self.signals}, key=lambda unit: self.units.get(unit) == ()):
            if devices >= size:
                parts.append([])
                devices = 0
            parts[-1].append(unit)
            devices += max(1, len(self.units.get(unit, ())), len(self.signals.get(unit, ())))
        for number, part in enumerate(parts, 1):
            yield replace(
                self,
                units={unit: self.units[unit] for unit in part if unit in self.units},
                signals={unit: self.signals[unit] for unit in part if unit in self.signals},
                links={unit: self.links[unit] for unit in part if unit in self.links},
                beside={unit: self.beside[unit] for unit in part if unit in self.beside},
                by_reload=self.by_reload and number == 1,
                more=number < len(parts),
            )


def changes_of(kind: str, looks: Mapping[str, Look], gone: Set[str], seen: Seen) -> Changes:
    """What these looks found that was not known before, and that the units in `gone` are there no more."""
    nothing = dict.fromkeys(gone, ())
    links = {unit: look.discovery.links for unit, look in looks.items() if look.links_changed}
    return Changes(
        kind,
        {unit: look.discovery.devices for unit, look in looks.items() if look.changed} | nothing,
        {unit: look.signals for unit, look in looks.items()} | nothing,
        links | {unit: () for unit in gone if seen.links.get(unit)},
        beside={unit: it for unit, look in looks.items() if look.changed and (it := look.discovery.beside)},
    )


def changes_by_exchange(kind: str, seen: Seen, inherited: Mapping[str, tuple[Device, ...]], old: Seen) -> Changes:
    """What differs once a new instance of a backend takes the place of the old one.

    What the old one knows counts for units that the new one has not read yet, and for those that changed after the new
    one began: they have to be looked at again.

    Args:
        kind: the backend's name.
        seen: what the new one knows; takes over from the old one what counts.
        inherited: the devices that the new one began with.
        old: what the old one knows.
    """
    now = dict(old.devices.items())
    moved = (inherited.keys() ^ now.keys()) | {unit for unit, it in now.items() if inherited.get(unit) is not it}
    believed = moved | (seen.devices.keys() - seen.signals.keys())  # what was read has signals, if only none
    for unit in believed:
        seen.believe(old, unit)
    gone = dict.fromkeys(now.keys() - seen.devices.keys(), ())
    changed = {unit: found for unit, found in seen.devices.items() if found is not now.get(unit)}
    return Changes(
        kind,
        changed | gone,
        {unit: said for unit, said in seen.signals.items() if unit not in believed} | gone,
        {unit: links for unit, links in seen.links.items() if links != old.links.get(unit, ())}
        | dict.fromkeys(old.links.keys() - seen.links.keys(), ()),
        by_reload=True,
        beside={unit: beside for unit in changed if (beside := seen.beside.get(unit))},
    )
