"""Defines which part of health outlives a restart.

Monotonic seconds are kept as they are, beside the boot they belong to: on Linux they count from the machine's start for
every process, so that they go on meaning the same until the next boot, whatever is done to the wall clock. After a boot
they mean nothing, and nothing that is kept in them is needed any more. Drains, which outlive boots, have wall clock times.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import Struct

from agent.health.drains import Drain
from agent.health.flapping import Quarantine
from agent.health.latches import Latch
from agent.health.probes import Sighting


class Handled(Struct, frozen=True):
    """How far a source's records have been read."""

    boot: str
    sequence: int

    def includes(self, boot: str, sequence: int) -> bool:
        """Was this record among them?"""
        return boot == self.boot and sequence <= self.sequence


class KeptHealth(msgspec.Struct, frozen=True):
    """What a HealthBook knows that no look at the hardware would tell it again, or not at once: since when it is so."""

    boot: str = ""
    """The boot that its monotonic times belong to."""
    drains: tuple[Drain, ...] = ()
    latches: tuple[Latch, ...] = ()
    quarantines: tuple[Quarantine, ...] = ()
    handled: Mapping[str, Handled] = {}
    """By the record's source: `kmsg`, `uevent`."""
    sightings: tuple[Sighting, ...] = ()
    """What probes saw last."""
