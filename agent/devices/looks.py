"""One walk over a backend's units in a worker thread: what was found, unit by unit, and where it stands now.

What backends answer is checked here, so that nonsense is blamed on the unit it came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from backends.base import Backend, Device, Discovery, Mount, Node, Problem, Signal
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
    failures: dict[str, BaseException] = field(default_factory=dict)
    listed: frozenset[str] | None = None
    """All units there are, if the walk asked for them."""
    unit: str | None = None
    """The unit being looked at; None while they are listed."""
    since: float = field(default_factory=time.monotonic)
    """When that began."""
    abandoned: bool = False


def walk(
    backend: Backend[Any],
    units: Set[str] | None,
    skip: Set[str],
    known: Known,
    progress: Walk,
    clock: Callable[[], float],
) -> None:
    """Look at these units, or at all there are, beside what is known; to be run in a thread.

    Raises:
        Exception: whatever `units()` raises. A unit that raises is a failure of that unit alone.
    """
    if units is None:
        units = progress.listed = checked_units(backend.units())
    for unit in sorted(units - skip):
        if progress.abandoned:
            return
        progress.unit, progress.since = unit, clock()
        try:
            look = _look(backend, unit, known.get(unit, ()))
        except BaseException as error:  # noqa: BLE001  # reported with the unit's name; this thread is ours alone
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


def checked_units(units: Any) -> frozenset[str]:
    """What a backend named as units.

    Raises:
        NonsenseError: these are no names.
    """
    if isinstance(units, str):
        raise NonsenseError(f"it returned the string {units!r} where units are due")
    listed = list(units)
    if wrong := [unit for unit in listed if not (isinstance(unit, str) and unit)]:
        raise NonsenseError(f"it returned {wrong[0]!r} where a unit's name is due")
    return frozenset(listed)


def _checked_discovery(found: Any, unit: str) -> Discovery:
    if not isinstance(found, Discovery):
        raise NonsenseError(f"discover() returned {type(found).__name__} where a Discovery is due")
    _check_all(found.devices, Device)
    _check_all(found.problems, Problem)
    for device in found.devices:
        _check_device(device, unit)
    return found


def _check_all(answer: Any, kind: type) -> None:
    if not isinstance(answer, tuple):
        raise NonsenseError(f"discover() returned {type(answer).__name__} where a tuple of {kind.__name__} is due")
    if wrong := [item for item in answer if not isinstance(item, kind)]:
        raise NonsenseError(f"discover() returned {type(wrong[0]).__name__} where a {kind.__name__} is due")


def _check_device(device: Any, unit: str) -> None:
    numa = device.numa_node
    allowed = {
        "key": isinstance(device.key, str) and device.key,
        "unit": device.unit == unit,
        "resource": device.resource is None or isinstance(device.resource, str),
        "hardware": device.hardware and _is_names(device.hardware),
        "depends": _is_names(device.depends),
        "exclusive": _is_names(device.exclusive),
        "identity": isinstance(device.identity, str),
        "nodes": _is_tuple_of(device.nodes, Node),
        "mounts": _is_tuple_of(device.mounts, Mount),
        "numa_node": numa is None or (isinstance(numa, int) and numa >= 0),
        "attributes": isinstance(device.attributes, Mapping)
        and all(isinstance(values, tuple) for values in device.attributes.values()),
    }
    if wrong := [name for name, right in allowed.items() if not right]:
        what = f"{wrong[0]} {getattr(device, wrong[0])!r}"
        raise NonsenseError(f"discover() returned device {device.key!r} with the impossible {what}")


def _is_tuple_of(answer: Any, kind: type) -> bool:
    return isinstance(answer, tuple) and all(isinstance(item, kind) for item in answer)


def _is_names(answer: Any) -> bool:
    return isinstance(answer, frozenset) and all(isinstance(name, str) for name in answer)
