"""Matches kernel records to backends: which backend wants one, and what waits until a scan finds the hardware it is about."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from agent.discovery.changes import Changes
from backends.base import ANY_SUBSYSTEM, Record, Signal, Watches
from backends.interface.known_devices import minded
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


class EarlySignals:
    """The signals of hardware that no scan has found yet: a line of the kernel's log may come before that scan.

    There is room for few, so that a flood of records about hardware that does not exist costs no memory; the oldest go.
    """

    def __init__(self) -> None:
        self.by_hardware: dict[str, list[tuple[Signal, Record]]] = {}

    def keep(self, signal: Signal, record: Record) -> None:
        """Keep a signal until its hardware is found; of those with the same reason, the last one."""
        others = [it for it in self.by_hardware.pop(signal.hardware, ()) if it[0].reason != signal.reason]
        self.by_hardware[signal.hardware] = [*others[1 - _EARLY_SIGNALS :], (signal, record)]
        if len(self.by_hardware) > _EARLY_HARDWARE:
            del self.by_hardware[next(iter(self.by_hardware))]

    def take(self, changes: Changes) -> Iterator[tuple[Signal, Record]]:
        """Yield the signals of the hardware that a scan found, in the order in which they came, and forget them."""
        for unit, devices in changes.units.items():
            for name in minded((*devices, *changes.beside.get(unit, ()))):
                yield from self.by_hardware.pop(name, ())
