"""Matches records to backends: which backend wants one, which tell of one fault, and which wait for a scan of their hardware."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from agent.discovery.unit_state import Changes
from backends.base import ANY_SUBSYSTEM, Record, Signal, Verdict, Watches
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


WITHIN: Final = 10.0
"""Seconds between two reports of one fault: the log is read again up to so long after a short failure."""

_SEVERITY: Final = (Verdict.NOTE, Verdict.INFO, Verdict.DEGRADED, Verdict.DELAYED, Verdict.NOW)
_FAULTS: Final = 256
_REPORTS: Final = 64  # of each


class Report(Struct, frozen=True):
    """A fault that happened once, and who told it."""

    since: float
    """When the first of them told it: monotonic seconds."""
    sources: frozenset[str]
    verdict: Verdict
    """The strictest that it was told with."""


def told(reports: tuple[Report, ...], source: str, verdict: Verdict, now: float) -> tuple[tuple[Report, ...], bool]:
    """The reports of a fault with one more from this source; and whether it is news, since no other source told it.

    Each source tells a fault once. So what it tells again is another one, and what it tells joins the first that it has not
    told yet. Where it says worse of it than the others did, that is news, too: a line of the log has words, NVML a number.
    """
    recent = tuple(it for it in reports if now - it.since <= WITHIN)[-_REPORTS:]
    for number, it in enumerate(recent):
        if source not in it.sources:
            is_worse = _SEVERITY.index(verdict) > _SEVERITY.index(it.verdict)
            joined = Report(it.since, it.sources | {source}, verdict if is_worse else it.verdict)
            return (*recent[:number], joined, *recent[number + 1 :]), is_worse
    return (*recent, Report(now, frozenset({source}), verdict)), True


class Faults:
    """The faults of the last seconds, for telling what several sources say of one of them once."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[Report, ...]] = {}

    def is_news(self, signal: Signal, source: str, now: float) -> bool:
        """Does this signal tell of a fault that no other source has told?"""
        if not signal.fault or signal.verdict not in _SEVERITY:
            return True
        reports = self._reports.pop(signal.fault, ())
        self._reports[signal.fault], is_news = told(reports, source, signal.verdict, now)
        if len(self._reports) > _FAULTS:
            del self._reports[next(iter(self._reports))]
        return is_news


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
