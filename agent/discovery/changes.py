"""Says what a walk over a backend's units changed, for inventory and health."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from msgspec import Struct, field
from msgspec.structs import replace

from agent.discovery.unit_walk import Look, Seen
from backends.base import Device, Link, Signal


class Changes(Struct, frozen=True):
    """What a scan changed, for inventory and health."""

    backend: str
    units: Mapping[str, tuple[Device, ...]]
    """Units whose devices differ from before; an empty tuple is a unit that is gone."""
    signals: Mapping[str, tuple[Signal, ...]]
    """Every unit that was looked at, with all that its probes said; nothing of a unit that is gone.
    A unit that was only probed is here if they said something else than before, or measured something."""
    links: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)
    """Units whose links differ from before."""
    since: float | None = None
    """When, on the monotonic clock, the first of the hints came that made us look; None: no hint did."""
    anew: bool = False
    """Another instance of the backend has found this, or there is none any more."""
    beside: Mapping[str, tuple[Device, ...]] = field(default_factory=dict)
    """Of the units whose devices differ, what else is there (`Discovery.beside`)."""
    more: bool = False
    """More follows at once: this is a part of what one walk found, which is too much for one step of the loop."""

    def in_parts(self, size: int) -> Iterator[Changes]:
        """The same in parts of so many units, for whom links do not matter; at least one part."""
        units = list({**self.units, **self.signals})
        for at in range(0, max(1, len(units)), size):
            part = units[at : at + size]
            yield replace(
                self,
                units={unit: self.units[unit] for unit in part if unit in self.units},
                signals={unit: self.signals[unit] for unit in part if unit in self.signals},
                links={},
                beside={unit: self.beside[unit] for unit in part if unit in self.beside},
                anew=self.anew and not at,
            )


def changes_of(kind: str, looks: Mapping[str, Look], gone: Set[str], seen: Seen) -> Changes:
    """What these looks told that was not seen before, and that those units are gone."""
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
    """What is different once another instance of a backend has taken the place of the one before.

    The other's word counts for units that the new one has not read yet, and for those that changed after it began: those
    are to be looked at again.

    Args:
        kind: the backend's name.
        seen: what the new one knows; takes over what is believed of the other.
        inherited: the devices that the new one began with.
        old: what the other knows.
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
        anew=True,
        beside={unit: beside for unit in changed if (beside := seen.beside.get(unit))},
    )
