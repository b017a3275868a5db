"""One walk over a backend's units in a worker thread: what was found, unit by unit, and where it stands now.

What backends answer is checked here, so that nonsense is blamed on the unit it came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.base import Backend, Device, Discovery, Signal
from backends.known import Known


class NonsenseError(Exception):
    """A backend answered something that its interface does not allow."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at one unit told."""

    discovery: Discovery
    signals: tuple[Signal, ...]
    changed: bool
    """Are the devices other than those known before? Compared in the thread: 10,000 comparisons take 25 ms."""


@dataclass(slots=True)
class Walk:
    """A walk under way: written by its thread, read by the loop."""

    looks: dict[str, Look] = field(default_factory=dict)
    failures: dict[str, Exception] = field(default_factory=dict)
    listed: frozenset[str] | None = None
    """All units there are, if the walk asked for them."""
    unit: str | None = None
    """The unit being looked at; None while they are listed."""
    since: float = field(default_factory=time.monotonic)
    """When that began."""
    abandoned: bool = False


def walk(
    backend: Backend[Any], units: Iterable[str] | None, known: Known, progress: Walk, clock: Callable[[], float]
) -> None:
    """Look at these units, or at all there are, beside what is known; to be run in a thread.

    Raises:
        Exception: whatever `units()` raises. A unit that raises is a failure of that unit alone.
    """
    if units is None:
        progress.listed = frozenset(_checked_units(backend.units()))
        units = sorted(progress.listed)
    for unit in units:
        if progress.abandoned:
            return
        progress.unit, progress.since = unit, clock()
        try:
            look = _look(backend, unit, known.get(unit, ()))
        except Exception as error:  # noqa: BLE001  # reported with the unit's name
            progress.failures[unit] = error
        else:
            progress.looks[unit] = look


def _look(backend: Backend[Any], unit: str, before: tuple[Device, ...]) -> Look:
    discovery = _checked_discovery(backend.discover(unit), unit)
    signals = [signal for device in discovery.devices for signal in backend.probe(device)]
    for signal in signals:
        if not isinstance(signal, Signal):
            raise NonsenseError(f"probe() returned {signal!r} where a Signal is due")
    return Look(discovery, tuple(signals), discovery.devices != before)


def _checked_units(units: Any) -> list[str]:
    listed = list(units)
    if wrong := [unit for unit in listed if not (isinstance(unit, str) and unit)]:
        raise NonsenseError(f"units() returned {wrong[0]!r} where a unit's name is due")
    return listed


def _checked_discovery(found: Any, unit: str) -> Discovery:
    if not isinstance(found, Discovery):
        raise NonsenseError(f"discover() returned {type(found).__name__} where a Discovery is due")
    for device in found.devices:
        _check_device(device, unit)
    return found


def _check_device(answer: Any, unit: str) -> None:
    if not isinstance(answer, Device):
        raise NonsenseError(f"discover() returned {type(answer).__name__} where a Device is due")
    device: Any = answer
    if not (isinstance(device.key, str) and device.key) or device.unit != unit:
        raise NonsenseError(f"discover() returned device {device.key!r} of unit {device.unit!r}")
    if not isinstance(device.hardware, frozenset) or not isinstance(device.attributes, Mapping):
        raise NonsenseError(f"discover() returned device {device.key!r} with hardware {device.hardware!r}")
    if device.numa_node is not None and not (isinstance(device.numa_node, int) and device.numa_node >= 0):
        raise NonsenseError(f"discover() returned device {device.key!r} on NUMA node {device.numa_node!r}")
