"""Matches kernel records to backends: which backend wants one, which signals it makes, whether that hardware was seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from agent.discovery import backend_answers
from agent.discovery.backend_answers import ask
from agent.discovery.changes import Changes
from backends.base import ANY_SUBSYSTEM, Backend, Device, Record, Signal, Watches
from backends.linux import kernel_log

_EARLY_HARDWARE: Final = 256
_EARLY_SIGNALS: Final = 16  # of each


def wants(watches: Watches, record: Record) -> bool:
    """Did a backend that watches this ask for the record? The sources hand on what any backend asked for."""
    if record.source == "kmsg":
        message = kernel_log.message(record)
        return any(message.startswith(text) for text in watches.kernel_lines)
    if watches.facts.isdisjoint(record.properties):
        return False
    return record.properties.get("SUBSYSTEM") in watches.subsystems or ANY_SUBSYSTEM in watches.subsystems


def signals(backend: Backend[Any], record: Record) -> tuple[Signal, ...]:
    """What the backend says that the record means.

    Raises:
        NonsenseError: it answered something else than signals.
        Exception: whatever `signals()` raises.
    """
    return ask(lambda: backend_answers.signals("signals", backend.signals(record)))


class Sightings:
    """Which hardware scans see, and the first signals of hardware that none has seen yet.

    A record may come before the scan that finds its hardware; so its signals wait for that, few enough that no flood of
    records about hardware that does not exist costs memory. The hardware of which something was said last stays.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, Sequence[Device]]] = {}  # by backend and unit
        self._places: dict[str, int] = {}  # the units in which a piece of hardware is
        self._early: dict[str, list[tuple[Signal, Record]]] = {}

    def known(self, signals: Sequence[Signal], record: Record) -> list[Signal]:
        """The signals of hardware that is there; the others are kept until it is. Events come of nothing else."""
        if record.source != "kmsg":
            return list(signals)
        for signal in signals:
            if signal.hardware not in self._places:
                self._keep(signal, record)
        return [signal for signal in signals if signal.hardware in self._places]

    def _keep(self, signal: Signal, record: Record) -> None:
        others = [said for said in self._early.pop(signal.hardware, ()) if said[0].reason != signal.reason]
        self._early[signal.hardware] = [*others[1 - _EARLY_SIGNALS :], (signal, record)]
        if len(self._early) > _EARLY_HARDWARE:
            del self._early[next(iter(self._early))]

    def found(self, changes: Changes) -> Iterator[tuple[Signal, Record]]:
        """A scan found this; what was said earlier of the hardware that is new, in the order in which it was said."""
        seen = self._seen.setdefault(changes.backend, {})
        for unit, devices in changes.units.items():
            devices += changes.beside.get(unit, ())
            for name in _hardware_of(devices):
                self._places[name] = self._places.get(name, 0) + 1
                yield from self._early.pop(name, ())
            for name in _hardware_of(seen.pop(unit, ())):
                self._places[name] -= 1
                if not self._places[name]:
                    del self._places[name]
            if devices:
                seen[unit] = devices


def _hardware_of(devices: Iterable[Device]) -> frozenset[str]:
    return frozenset().union(*(device.hardware | device.depends for device in devices))
