"""A third party's backend that hears of its hardware by the kernel's log and events alone: two lamps.

`lamp NAME: burnt out` in the log, or an event with LAMP=NAME, makes one unhealthy; any other line on lamps upsets it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec

from backends.base import (
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    Record,
    Resource,
    Signal,
    Verdict,
    Watches,
)
from backends.interface.values import Known


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None."""


class Listening(Backend[Options]):
    options_type: ClassVar = Options

    def units(self) -> Iterable[str]:
        return ["lamp0", "lamp1"]

    def discover(self, unit: str) -> Discovery:
        return Discovery((Device(unit, unit, frozenset({f"lamp:{unit}"})),))

    def edits(self, resource: Resource[Options], grants: Sequence[Grant]) -> ContainerEdits:
        return ContainerEdits()

    def watches(self, known: Known) -> Watches:
        return Watches(
            subsystems=frozenset({"mem"}), facts=frozenset({"LAMP"}), kernel_lines=frozenset({"lamp "}), links=True
        )

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:
        return ()

    def signals(self, record: Record) -> Iterable[Signal]:
        if record.source == "uevent":
            yield Signal(f"lamp:{record.properties['LAMP']}", "event", Verdict.NOW, "It is out.")
        elif found := re.fullmatch(r"lamp (\w+): burnt out", record.text):
            yield Signal(f"lamp:{found[1]}", "burnt-out", Verdict.NOW, "It is burnt out.")
        else:
            raise ValueError(record.text)
