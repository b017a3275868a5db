"""Makes hardware ready: adopts what joins a resource, and claims again, at our start, what pods still hold.

The daemon does this (binds drivers, creates functions), `discover` never does. A device that is new in a list, or has changed,
is adopted, until it works or the device has left its list.

A reboot undoes what was done for pods, and a kubelet allocates nothing more to a pod that it knows (kubelet contract: A4), so
that its containers would wait for their nodes for ever. `claim` does nothing where nothing is to be done. What an operator
undoes later is left alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Set
from functools import partial
from typing import Any, Final, Protocol

import structlog

from agent.claims.ledger import Ledger
from agent.discovery import backend_answers
from agent.discovery.backend_answers import ask
from agent.hardware.reconciler import Reconciler, Want
from agent.inventory.inventory import Inventory
from agent.model import REPLACED, Held, SlotKey, Snapshot
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Trouble
from agent.runtime.workers import Workers, in_batches
from backends.base import Backend, Device, Grant, Resource

READY_DEADLINE: Final = 60.0
"""Seconds that a backend may take to make one device ready before it is reported."""

log = structlog.get_logger()


# --- what joins a resource ---


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
        self.due = Doorbell()
        """Set when other resources are in force."""

    async def run(self) -> None:
        """Adopt for all resources whenever others are in force, until cancelled."""
        while True:
            await self.due.rung()
            await self.adopt_what_is_new()

    async def adopt_what_is_new(self) -> None:
        """Adopt for all resources, once every backend has scanned: only then is it known which device is whose."""
        await self._discovery.looked()
        self.configure(self._inventory.selection.in_force())

    def configure(self, resources: Iterable[Resource[Any]]) -> None:
        """Take these as the resources in force, and adopt all devices of those that are new or have changed."""
        before = self._wanting
        self._wanting = {r.name: r for r in resources if _adopts(self._backends[r.spec.backend], r)}
        others = {name for name, resource in self._wanting.items() if resource != before.get(name)}
        for slot in [slot for slot in self._devices if slot[0] not in self._wanting or slot[0] in others]:
            self._note(slot, None)
        for name in others:
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
        async with self._reconciler.turns.take_within(READY_DEADLINE, device.hardware, moves=False) as turn:
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
    """Whether the backend adopts devices of this resource. One that raises is asked nothing more."""
    try:
        return bool(ask(lambda: backend.adopts(resource)))
    except Exception:
        log.exception("backend-failed", backend=resource.spec.backend, call="adopts", resource=resource.name)
        return False


# --- what pods hold at our start ---


class Resumer:
    """Calls `claim` again for the claims that an earlier run had recorded."""

    def __init__(
        self,
        backends: Mapping[str, Backend[Any]],
        inventory: Inventory,
        ledger: Ledger,
        reconciler: Reconciler,
        look: Callable[[str, Set[str]], Awaitable[None]],
        pods: Callable[[SlotKey], Collection[str]],
    ) -> None:
        """Prepare.

        Args:
            backends: those in force now, by their kinds.
            inventory: what there is.
            ledger: who holds what.
            reconciler: tries until it works.
            look: looks at units of a backend once more.
            pods: that have a slot, by the kubelet's last answer. The ledger may still have pods that ended while no agent ran.
        """
        self._backends = backends
        self._inventory = inventory
        self._ledger = ledger
        self._reconciler = reconciler
        self._look = look
        self._pods = pods

    async def resume(self) -> None:
        """Try each of them until it works or its claim ends; to be called once all backends have scanned."""
        async for batch in in_batches(self._ledger.held()):
            for held in batch:
                if self._may_need_claim(held):
                    attempt, trouble = partial(self._resume, held.slot), partial(self._trouble, held)
                    self._reconciler.want(_key(held), Want(f"resume {held.backend}", attempt, trouble))

    def over(self, ended: Iterable[Held]) -> None:
        """Stop trying for these claims, which have ended."""
        for held in ended:
            self._reconciler.drop(_key(held))

    async def _resume(self, slot: SlotKey, workers: Workers) -> bool:
        held = self._ledger.of(slot)
        return held is None or await self._claim(held, workers)

    def _trouble(self, held: Held) -> Trouble:
        return self._reconciler.problems.trouble(
            "resumption",
            f"{held.resource}/{held.id}, which a pod holds, could not be made ready again",
            "not-resumed",
            backend=held.backend,
            resource=held.resource,
            device=held.id,
            then="trying again later and later",
        )

    def _may_need_claim(self, held: Held) -> bool:
        try:
            return self._needs_claim(held) is not None
        except Exception:  # noqa: BLE001  # whatever a backend raises; `_resume` asks again, and reports it
            return True

    def _needs_claim(self, held: Held) -> Resource[Any] | None:
        """The resource of a claim if its backend has `claim`; None for what another plugin gave, and made ready."""
        resource = self._inventory.resource(held.resource)
        if resource is None or resource.spec.backend != held.backend or held.traced:
            return None
        return resource if backend_answers.needs_claim(self._backends[held.backend], resource) else None

    async def _claim(self, held: Held, workers: Workers) -> bool:
        """Call `claim` and look at the device; False if the pod or the device is not there yet.

        Raises:
            Exception: it could not be made ready.
        """
        resource, kind = self._needs_claim(held), held.backend
        if resource is None:
            return True
        async with self._reconciler.turns.take_within(READY_DEADLINE, held.things) as turn:
            device = self._device(held)
            if device is None or not self._pods(held.slot):
                return False
            if self._ledger.of(held.slot) != held or self._inventory.resource(held.resource) != resource:
                return False  # it has changed since we waited
            call = partial(self._backends[kind].claim, resource, [Grant(held.id, device)])
            await turn.run(workers, call)
        await self._look(kind, {device.unit})
        slot = self._inventory.slot(*held.slot)
        if slot is not None and slot.device not in (None, device):
            log.info("resumed", backend=kind, resource=held.resource, device=device.key)
        return True

    def _device(self, held: Held) -> Device | None:
        """The device that the pod was given, as it is now; None if the claim does not name its hardware."""
        slot = self._inventory.slot(*held.slot)
        if slot is None or slot.device is None or slot.health.reason in REPLACED:
            return None
        return slot.device if held.hardware or not slot.device.hardware else None


def _key(held: Held) -> Hashable:
    """What the reconciler knows the claim by."""
    return "resume", held.slot
