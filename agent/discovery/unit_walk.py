"""Walks over a backend's units in a worker thread, and says at any time what was found and where the walk stands.

What backends answer is checked while it is read, so that nonsense is blamed on the unit it came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Set
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from agent.discovery import backend_answers
from agent.runtime import garbage
from agent.runtime.supervision import shortage
from backends.base import Backend, Device, Discovery, Link, Signal, Verdict
from backends.interface.known_devices import Known

Glance = tuple[object, ...]
"""What `Backend.glance` said of each of a unit's devices."""


class Seen(Struct, frozen=True):
    """What was seen last, unit by unit, to compare with; a walk's thread only ever gets single units from it."""

    devices: Known = field(default_factory=Known)
    links: dict[str, tuple[Link, ...]] = field(default_factory=dict)
    signals: dict[str, tuple[Signal, ...]] = field(default_factory=dict)
    glances: dict[str, Glance] = field(default_factory=dict)
    """What was to be seen right before the last probe: what has changed since then shows at the next glance."""
    beside: dict[str, tuple[Device, ...]] = field(default_factory=dict)

    def inherited(self) -> Seen:
        """What another instance of the backend compares with; what it has looked at itself has signals."""
        return Seen(self.devices.copy(), self.links.copy())

    def believe(self, other: Seen, unit: str) -> None:
        """Of this unit, what the other has seen counts."""
        self.replace({}, {unit})
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            if unit in theirs:
                mine[unit] = theirs[unit]

    def _parts(self) -> tuple[MutableMapping[str, Any], ...]:
        return self.devices, self.links, self.signals, self.glances, self.beside

    def selectable(self) -> list[Device]:
        """All devices, and what is beside them."""
        return [device for seen in (self.devices, self.beside) for found in seen.values() for device in found]

    def hardware_in(self, unit: str) -> list[str]:
        """The hardware of a unit's devices."""
        return sorted({name for device in self.devices.get(unit, ()) for name in device.hardware})

    def replace(self, looks: Mapping[str, Look], gone: Set[str]) -> None:
        """These units were looked at, and those are there no more."""
        for unit, look in looks.items():
            if look.changed or unit not in self.devices:
                self.devices[unit] = look.discovery.devices
            if look.links_changed:
                self.links[unit] = look.discovery.links
            self.signals[unit] = look.signals
            self.glances[unit] = look.glance
            self.beside[unit] = look.discovery.beside
        for unit in gone:
            for last in self._parts():
                last.pop(unit, None)


class Look(Struct, frozen=True):
    """What one look at one unit told."""

    discovery: Discovery
    glance: Glance
    signals: tuple[Signal, ...]
    changed: bool
    """Are the devices other than those known before? Compared in the thread: 10,000 comparisons take 25 ms."""
    links_changed: bool


class Walk(Struct):
    """A walk under way: written by its thread, read by the loop."""

    looks: dict[str, Look] = field(default_factory=dict)
    probes: dict[str, tuple[Signal, ...] | None] = field(default_factory=dict)
    """What was said of units that were only probed; None where that is nothing new."""
    glances: dict[str, Glance] = field(default_factory=dict)
    """What was to be seen at a glance before these were probed."""
    failures: dict[str, BaseException] = field(default_factory=dict)
    listed: frozenset[str] | None = None
    """All units there are, if the walk asked for them."""
    unit: str | None = None
    """The unit being looked at; None while they are listed."""
    since: float = field(default_factory=time.monotonic)
    """When that began; set before the unit."""
    abandoned: bool = False
    interrupted: bool = False
    """Something more urgent came up: end with the unit that is being probed."""

    def so_far(self) -> Walk:
        """What it has come to; the thread of one that hangs may write on at any time."""
        return replace(self, looks=dict(self.looks), failures=dict(self.failures))

    def only(self, unit: str) -> Walk:
        """What it has come to of one unit."""

        def of(every: dict[str, Any]) -> dict[str, Any]:
            return {unit: every[unit]} if unit in every else {}

        parts = of(self.looks), of(self.probes), of(self.glances), of(self.failures)
        return Walk(*parts, unit=unit, since=self.since)


def in_parts(looks: Mapping[str, Look], gone: Set[str], size: int) -> Iterator[tuple[dict[str, Look], frozenset[str]]]:
    """Looks at units, and units that are gone, in parts of about so many devices; one part, if need be an empty one.

    What is there comes before what is gone: hardware that has moved from one unit to another has not been away.
    """
    part, devices = dict[str, Look](), 0
    for unit, look in looks.items():
        if devices >= size:
            yield part, frozenset()
            part, devices = {}, 0
        part[unit] = look
        devices += max(1, len(look.discovery.devices))
    left = sorted(gone)
    last = frozenset(left[: max(0, size - devices)])
    for at in range(len(last), len(left), size):
        yield part, last
        part, last = {}, frozenset(left[at : at + size])
    yield part, last


def walk(
    backend: Backend[Any],
    units: Set[str] | None,
    skip: Set[str],
    seen: Seen,
    progress: Walk,
    clock: Callable[[], float],
) -> None:
    """Look at these units, or at all there are, beside what is known; to be run in a thread.

    Raises:
        Exception: whatever `units()` raises. A unit that raises is a failure of that unit alone.
    """
    if units is None:
        listed = backend_answers.units(backend.units())
        if not seen.devices.keys() <= listed:
            shortage.check()
        units = progress.listed = listed
    pile = garbage.Pile()
    for unit in sorted(units - skip):
        if progress.abandoned:
            return
        progress.since, progress.unit = clock(), unit
        try:
            look = _look(backend, unit, seen)
        except BaseException as error:  # noqa: BLE001  # reported with the unit's name; this thread is ours alone
            progress.failures[unit] = error
        else:
            progress.looks[unit] = look
            if look.changed:
                pile.grow(len(look.discovery.devices))


def _look(backend: Backend[Any], unit: str, seen: Seen) -> Look:
    discovery = backend_answers.discovery(backend.discover(unit), unit)
    glance, signals = _glance(backend, discovery.devices), _probe(backend, discovery.devices)
    known = seen.devices.get(unit, ())
    if (changed := discovery.devices != known) or discovery.problems or _is_ill(signals):
        shortage.check()
    if not changed:
        discovery = replace(discovery, devices=known)  # so that thousands of equal ones do not wait to be told
    return Look(
        discovery,
        glance,
        signals,
        changed=changed,
        links_changed=discovery.links != seen.links.get(unit, ()),
    )


def probe(
    backend: Backend[Any],
    units: Set[str],
    at_a_glance: Set[str],
    seen: Seen,
    progress: Walk,
    clock: Callable[[], float],
) -> None:
    """Look at the health of these units' known devices, and at nothing else; to be run in a thread.

    Of those `at_a_glance` no more than a glance is taken, unless it shows something new or the unit is ill: how it
    recovers need not show.
    """
    for unit in sorted(units):
        progress.since, progress.unit = clock(), unit
        try:
            _probe_unit(backend, unit, unit in at_a_glance, seen, progress)
        except BaseException as error:  # noqa: BLE001  # as above
            progress.failures[unit] = error
        if progress.abandoned or progress.interrupted:
            return


def _probe_unit(backend: Backend[Any], unit: str, at_a_glance: bool, seen: Seen, progress: Walk) -> None:
    """What is as it was is not told again: nothing can follow from it. Only of numbers every look counts."""
    devices = seen.devices.get(unit, ())
    glance = _glance(backend, devices)
    if at_a_glance and glance == seen.glances.get(unit) and not _is_ill(seen.signals.get(unit, ())):
        progress.probes[unit] = None
        return
    signals = _probe(backend, devices)
    if _is_ill(signals):
        shortage.check()
    new = signals != seen.signals.get(unit, ()) or any(signal.measure is not None for signal in signals)
    progress.probes[unit] = signals if new else None
    progress.glances[unit] = glance


def _is_ill(signals: Iterable[Signal]) -> bool:
    return any(signal.verdict in (Verdict.NOW, Verdict.DELAYED) and signal.measure is None for signal in signals)


def _glance(backend: Backend[Any], devices: tuple[Device, ...]) -> Glance:
    return tuple(backend.glance(device) for device in devices)


def _probe(backend: Backend[Any], devices: tuple[Device, ...]) -> tuple[Signal, ...]:
    return backend_answers.signals("probe", (signal for device in devices for signal in backend.probe(device)))
