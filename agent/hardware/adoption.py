"""Prepares hardware that joins a resource (binds drivers, creates functions): the daemon does this, `discover` never does.

A device that is new in a list, or has changed, is adopted, until it works or the device has left its list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import partial
from typing import Any, Final, Protocol

import structlog

from agent.discovery.backend_answers import ask
from agent.hardware.reconciler import Reconciler, Want
from agent.inventory.inventory import Inventory
from agent.model import SlotKey, Snapshot
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Trouble
from agent.runtime.workers import Workers
from backends.base import Backend, Device, Resource

ADOPT_DEADLINE: Final = 60.0
"""Seconds that a backend may take to make one device ready before it is reported."""

log = structlog.get_logger()


class Discovery(Protocol):
    """The part of the daemon that scans."""

    async def look_at(self, kind: str, units: Set[str]) -> None:
        """Look at these units of a backend once more."""

    async def looked(self) -> None:
        """Wait until every backend has had its first scan."""


class Adopter:
    """Calls `adopt` for the devices of resources whose backend adopts devices."""

    def __init__(
        self, backends: Mapping[str, Backend[Any]], inventory: Inventory, reconciler: Reconciler, discovery: Discovery
    ) -> None:
        """Prepare; `backends` are those in force now."""
        self._wanting: dict[str, Resource[Any]] = {}
        self._backends, self._inventory = backends, inventory
        self._reconciler, self._discovery = reconciler, discovery
        self._devices: dict[SlotKey, Device] = {}  # those in the lists, adopted or being adopted
        self.anew = Doorbell()
        """Set when other resources are in force."""

    async def run(self) -> None:
        """Adopt for all resources whenever others are in force, until cancelled."""
        while True:
            await self.anew.rung()
            await self.adopt_what_is_new()

    async def adopt_what_is_new(self) -> None:
        """Adopt for all resources, once every backend has scanned: only then is it known which device is whose."""
        await self._discovery.looked()
        self.configure(self._inventory.selection.in_force())

    def configure(self, resources: Iterable[Resource[Any]]) -> None:
        """Take these as the resources in force, and adopt all devices of those that are new or have changed."""
        before = self._wanting
        self._wanting = {r.name: r for r in resources if _adopts(self._backends[r.spec.backend], r)}
        anew = {name for name, resource in self._wanting.items() if resource != before.get(name)}
        for slot in [slot for slot in self._devices if slot[0] not in self._wanting or slot[0] in anew]:
            self._note(slot, None)
        for name in anew:
            for device_id, listed in self._inventory.slots(name).items():
                self._note((name, device_id), listed.device)

    def listed(self, snapshot: Snapshot) -> None:
        """Adopt the devices that are new in this list, and forget those that left it."""
        if snapshot.resource not in self._wanting:
            return
        changed = snapshot.changed
        for device_id in self._all_of(snapshot) if changed is None else changed:
            slot = snapshot.slots.get(device_id)
            self._note((snapshot.resource, device_id), slot and slot.device)

    def _all_of(self, snapshot: Snapshot) -> Set[str]:
        return snapshot.slots.keys() | {device_id for name, device_id in self._devices if name == snapshot.resource}

    def _note(self, slot: SlotKey, device: Device | None) -> None:
        """Note that this slot has this device now, or none; adopt it if it is another one."""
        if device == self._devices.get(slot):
            return
        if device is None:
            del self._devices[slot]
            self._reconciler.drop(("adopt", slot))
            return
        self._devices[slot] = device
        resource = self._wanting[slot[0]]
        attempt, trouble = partial(self._adopt, resource, slot, device), partial(self._trouble, resource, device)
        self._reconciler.want(("adopt", slot), Want(f"adopt {resource.spec.backend}", attempt, trouble))

    def complaints(self) -> dict[SlotKey, str]:
        """The slots whose device could not be made ready, and why."""
        troubled = self._reconciler.troubled
        return {slot: troubled["adopt", slot].reason for slot in self._devices if ("adopt", slot) in troubled}

    async def _adopt(self, resource: Resource[Any], slot: SlotKey, device: Device, workers: Workers) -> bool:
        """Make it ready, and see what came of it.

        Raises:
            Exception: it could not be made ready.
        """
        kind = resource.spec.backend
        # no move of ours: hardware that goes again after each `adopt` must count as flapping
        async with self._reconciler.turns.take_within(ADOPT_DEADLINE, device.hardware, moves=False) as turn:
            if self._devices.get(slot) is not device or self._wanting.get(slot[0]) != resource:
                return True  # it is gone, or another one, since we waited for the turn
            acted = await turn.run(workers, partial(self._backends[kind].adopt, resource, device))
        if acted:
            await self._discovery.look_at(kind, {device.unit})
        if acted or ("adopt", slot) in self._reconciler.troubled:
            log.info("adopted", backend=kind, resource=resource.name, device=device.key)
        return True

    def _trouble(self, resource: Resource[Any], device: Device) -> Trouble:
        return self._reconciler.problems.trouble(
            "adoption",
            f"{device.key} could not be made ready for {resource.name}",
            "not-adopted",
            backend=resource.spec.backend,
            resource=resource.name,
            device=device.key,
            then="trying again later and later",
        )


def _adopts(backend: Backend[Any], resource: Resource[Any]) -> bool:
    """Does the backend adopt devices of this resource? One that raises is asked nothing more."""
    try:
        return bool(ask(lambda: backend.adopts(resource)))
    except Exception:
        log.exception("backend-failed", backend=resource.spec.backend, call="adopts", resource=resource.name)
        return False
