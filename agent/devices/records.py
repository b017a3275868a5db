"""Which backend wants a record of the kernel's, and what it makes of it."""

from __future__ import annotations

from typing import Any

from agent.devices.looks import NonsenseError
from backends.base import ANY_SUBSYSTEM, Backend, Record, Signal, Watches


def wants(watches: Watches, record: Record) -> bool:
    """Did a backend that watches this ask for the record? The sources hand on what any backend asked for."""
    if record.source == "kmsg":
        return any(text in record.text for text in watches.kernel_lines)
    if watches.facts.isdisjoint(record.properties):
        return False
    return record.properties.get("SUBSYSTEM") in watches.subsystems or ANY_SUBSYSTEM in watches.subsystems


def signals(backend: Backend[Any], record: Record) -> tuple[Signal, ...]:
    """What the backend says that the record means.

    Raises:
        NonsenseError: it answered something else than signals.
        Exception: whatever `signals()` raises.
    """
    said: tuple[Any, ...] = tuple(backend.signals(record))
    if wrong := [signal for signal in said if not isinstance(signal, Signal)]:
        raise NonsenseError(f"it returned {wrong[0]!r} where a Signal is due")
    return said
