"""A third party's backend for the accelerators of a published machine, with their bridges and links.

A file in the directory `dead` with an accelerator's name says that it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import msgspec

from backends.base import (
    All,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    HostPath,
    PathChange,
    Resource,
    Signal,
    Verdict,
    Watches,
)
from backends.interface.values import Known
from tests.placement.machines import MACHINES


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: str
    dead: str


class Linked(Backend[Options]):
    options_type: ClassVar = Options

    def _dead(self) -> HostPath:
        return HostPath(self.resources[0].spec.options.dead)

    def units(self) -> Iterable[str]:
        return [device.unit for device in MACHINES[self.resources[0].spec.options.machine]().devices]

    def discover(self, unit: str) -> Discovery:
        machine = MACHINES[self.resources[0].spec.options.machine]()
        devices = tuple(device for device in machine.devices if device.unit == unit)
        return Discovery(devices, tuple(link for link in machine.links if unit in (link.one, link.other)))

    def probe(self, device: Device) -> Iterable[Signal]:
        if self.host.local(self._dead() / device.key).exists():
            yield Signal(min(device.hardware), "dead", Verdict.NOW, "it has fallen off the bus")

    def watches(self, known: Known) -> Watches:
        return Watches(directories=frozenset({self._dead()}))

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        return [hint.path.name] if isinstance(hint, PathChange) and hint.path.name in known else ()

    def prefers(self, resource: Resource[Options]) -> bool:
        return True

    def edits(self, resource: Resource[Options], grants: Sequence[Grant]) -> ContainerEdits:
        return ContainerEdits(env={"LINKED": ",".join(grant.id for grant in grants)})
