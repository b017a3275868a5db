"""What is known of one unit of a backend, as one value, and what differs between two of them, for inventory and health."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from backends.base import Device, Link, Problem, Signal


class UnitState(Struct, frozen=True, gc=False):
    """What a read or a probe of a unit showed. A part that is equal to the one before it is the same object."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    beside: tuple[Device, ...] = ()
    """`Discovery.beside`."""
    problems: tuple[Problem, ...] = ()
    signals: tuple[Signal, ...] = ()
    """What its last probe said."""
    glance: tuple[object, ...] | None = None
    """What a glance at each device showed right before the last probe, so that whatever has changed since then shows at the
    next. None if it was read since: the next glance has it probed."""
    inherited: bool = False
    """It was read by another instance of the backend, and not yet by this one: its signals are not known."""


NOTHING: Final = UnitState()
"""What is known of a unit that has not been read, and of one that is gone."""


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


def changes_of(
    kind: str,
    before: Mapping[str, UnitState],
    after: Mapping[str, UnitState],
    untold: Set[str] = frozenset(),
    *,
    since: float | None = None,
    by_reload: bool = False,
) -> Changes:
    """What differs between these states of units; `NOTHING` is a unit that is gone.

    Args:
        kind: the backend's name.
        before: what was known.
        after: what is known now of the units that may differ.
        untold: the units of which no signals are told; of the others they are, whether they differ or not.
        since: when the first hint came that led to this.
        by_reload: is it another instance that knows `after`?
    """
    pairs = [(unit, before.get(unit, NOTHING), now) for unit, now in after.items()]
    differ = {unit: now for unit, was, now in pairs if now is NOTHING or now.devices is not was.devices}
    return Changes(
        kind,
        {unit: now.devices for unit, now in differ.items()},
        {unit: now.signals for unit, now in after.items() if unit not in untold},
        {unit: now.links for unit, was, now in pairs if now.links is not was.links},
        since,
        by_reload,
        {unit: now.beside for unit, now in differ.items() if now.beside},
    )
