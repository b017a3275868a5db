"""Reads or probes a backend's units one by one in a worker thread, and shows what was found so far and which unit it is at.

What backends answer is checked here, so that nonsense is a failure of the unit it came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Set
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from agent.discovery import backend_answers
from agent.runtime import garbage
from agent.runtime.supervision import resource_shortage
from backends.base import Backend, Device, Discovery, Link, Signal, Verdict
from backends.interface.known_devices import Known

Glance = tuple[object, ...]
"""What `Backend.glance` said of each of a unit's devices."""


class Seen(Struct, frozen=True):
    """What was found last, by unit, to compare with. The loop writes it; a walk's thread gets single units from it."""

    devices: Known = field(default_factory=Known)
    links: dict[str, tuple[Link, ...]] = field(default_factory=dict)
    signals: dict[str, tuple[Signal, ...]] = field(default_factory=dict)
    glances: dict[str, Glance] = field(default_factory=dict)
    """What a glance showed right before the last probe, so that whatever has changed since then shows at the next.
    None of units that were read since: the next glance has them probed."""
    beside: dict[str, tuple[Device, ...]] = field(default_factory=dict)
    """`Discovery.beside` of the units that have any."""

    def inherited(self) -> Seen:
        """What another instance of the backend begins with: no signals, which only units have that it has read itself."""
        return Seen(self.devices.copy(), self.links.copy())

    def believe(self, other: Seen, unit: str) -> None:
        """Take over what another instance knows of this unit."""
        self.replace({}, {unit})
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            if unit in theirs:
                mine[unit] = theirs[unit]

    def _parts(self) -> tuple[MutableMapping[str, Any], ...]:
        return self.devices, self.links, self.signals, self.glances, self.beside

    def selectable(self) -> list[Device]:
        """All devices, and what is beside them."""
        return [device for seen in (self.devices, self.beside) for found in seen.values() for device in found]

    def has(self, hardware: str) -> bool:
        """Does a device own this hardware or depend on it, or one of what is beside them?"""
        return bool(self.devices.minding(hardware)) or any(
            hardware in device.hardware | device.depends for found in self.beside.values() for device in found
        )

    def hardware_in(self, unit: str) -> list[str]:
        """The hardware of a unit's devices."""
        return sorted({name for device in self.devices.get(unit, ()) for name in device.hardware})

    def replace(self, looks: Mapping[str, Look], gone: Set[str]) -> None:
        """Take in what was read of these units, and that the units in `gone` are there no more."""
        for unit, look in looks.items():
            if look.changed or unit not in self.devices:
                self.devices[unit] = look.discovery.devices
            if look.links_changed:
                self.links[unit] = look.discovery.links
            self.signals[unit] = look.signals
            self.glances.pop(unit, None)
            if look.discovery.beside:
                self.beside[unit] = look.discovery.beside
            else:
                self.beside.pop(unit, None)
        for unit in gone:
            for last in self._parts():
                if unit in last:
                    del last[unit]


class Look(Struct, frozen=True):
    """What was found by reading one unit and probing its devices."""

    discovery: Discovery
    signals: tuple[Signal, ...]
    changed: bool
    """Do the devices differ from those known before? Compared in the thread: 10,000 comparisons take 25 ms."""
    links_changed: bool


class Walk(Struct):
    """A walk under way: written by its thread, read by the loop."""

    looks: dict[str, Look] = field(default_factory=dict)
    probes: dict[str, tuple[Signal, ...] | None] = field(default_factory=dict)
    """The signals of units that were only probed; None where they are those of the last time."""
    glances: dict[str, Glance] = field(default_factory=dict)
    """What a glance at these units showed before they were probed."""
    failures: dict[str, BaseException] = field(default_factory=dict)
    listed: frozenset[str] | None = None
    """All units there are, if the walk asked for them."""
    unit: str | None = None
    """The unit being looked at; None while they are listed."""
    since: float = field(default_factory=time.monotonic)
    """When its read began; set before the unit."""
    abandoned: bool = False
    """Nobody waits for its thread any more: it ends with the unit that it is at."""

    def so_far(self) -> Walk:
        """A copy of what was found, for a walk whose thread may write on at any time."""
        copies = self.looks.copy(), self.probes.copy(), self.glances.copy(), self.failures.copy()
        return Walk(*copies, listed=self.listed, abandoned=self.abandoned)

    def only(self, unit: str) -> Walk:
        """What was found of one unit."""

        def of(every: dict[str, Any]) -> dict[str, Any]:
            return {unit: every[unit]} if unit in every else {}

        parts = of(self.looks), of(self.probes), of(self.glances), of(self.failures)
        return Walk(*parts, unit=unit, since=self.since)


def walk(
    backend: Backend[Any],
    units: Set[str] | None,
    skip: Set[str],
    seen: Seen,
    progress: Walk,
    clock: Callable[[], float],
) -> None:
    """Read these units, or all there are, and compare them with what is known; to be run in a thread.

    Raises:
        Exception: whatever `units()` raises. What a unit raises is a failure of that unit alone.
    """
    if units is None:
        listed = backend_answers.units(backend.units())
        if not seen.devices.keys() <= listed:
            resource_shortage.check()
        units = progress.listed = listed
    new = 0  # devices, since some were hidden from the garbage collector
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
            if look.changed and (new := new + len(look.discovery.devices)) >= garbage.ENOUGH:
                garbage.hide()
                new = 0


def _look(backend: Backend[Any], unit: str, seen: Seen) -> Look:
    discovery = backend_answers.discovery(backend.discover(unit), unit)
    signals = backend_answers.probed(backend, discovery.devices)
    known = seen.devices.get(unit, ())
    if (changed := discovery.devices != known) or discovery.problems or _is_ill(signals):
        resource_shortage.check()
    if not changed:
        discovery = replace(discovery, devices=known)  # equal ones need not be kept twice until they are published
    return Look(discovery, signals, changed=changed, links_changed=discovery.links != seen.links.get(unit, ()))


def probe(
    backend: Backend[Any],
    units: Set[str],
    seen: Seen,
    progress: Walk,
    clock: Callable[[], float],
    is_interrupted: Callable[[], bool],
    *,
    at_a_glance: bool,
) -> None:
    """Probe the known devices of these units, and read nothing else; to be run in a thread.

    Args:
        backend: the one that is asked.
        units: what is to be probed.
        seen: what it said last.
        progress: what is found is written into it.
        clock: the time in seconds.
        is_interrupted: whether something more urgent waits: then it ends with the unit that it is at.
        at_a_glance: leave out units that are well and of which a glance shows nothing new. How one that is ill recovers
            need not show.
    """
    for unit in sorted(units):
        progress.since, progress.unit = clock(), unit
        try:
            _probe_unit(backend, unit, seen, progress, at_a_glance=at_a_glance)
        except BaseException as error:  # noqa: BLE001  # as above
            progress.failures[unit] = error
        if progress.abandoned or is_interrupted():
            return


def _probe_unit(backend: Backend[Any], unit: str, seen: Seen, progress: Walk, *, at_a_glance: bool) -> None:
    """Probe a unit's devices. Signals are told only if they differ from the last ones, or have a measure."""
    devices = seen.devices.get(unit, ())
    glance = tuple(backend.glance(device) for device in devices)
    if at_a_glance and glance == seen.glances.get(unit) and not _is_ill(seen.signals.get(unit, ())):
        progress.probes[unit] = None
        return
    signals = backend_answers.probed(backend, devices)
    if _is_ill(signals):
        resource_shortage.check()
    new = signals != seen.signals.get(unit, ()) or any(signal.measure is not None for signal in signals)
    progress.probes[unit] = signals if new else None
    progress.glances[unit] = glance


def _is_ill(signals: Iterable[Signal]) -> bool:
    return any(signal.verdict in (Verdict.NOW, Verdict.DELAYED) and signal.measure is None for signal in signals)
