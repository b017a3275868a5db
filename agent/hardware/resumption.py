"""Prepares again, at our start, the hardware that pods still hold: a reboot undoes what was done for them.

A kubelet allocates nothing anew to a pod that it knows (kubelet contract: A4), so that its containers would wait for
their nodes for ever. `claim` does nothing where nothing is to be done. What an operator undoes later is left alone.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Set
from functools import partial
from typing import Any, Final

import structlog

from agent.claims.ledger import Ledger
from agent.discovery import backend_answers
from agent.hardware.reconciler import Reconciler, Want
from agent.inventory.inventory import Inventory
from agent.model import REPLACED, Held, SlotKey
from agent.runtime.problems import Trouble
from agent.runtime.workers import Workers, in_batches
from backends.base import Backend, Device, Grant, Resource

RESUME_DEADLINE: Final = 60.0
"""Seconds that a backend may take to make one device ready before it is reported."""

log = structlog.get_logger()


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
        async with self._reconciler.turns.take_within(RESUME_DEADLINE, held.things) as turn:
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
