"""Prepares again, at our start, the hardware that pods still hold: a reboot undoes what was done for them.

A kubelet allocates nothing anew to a pod that it knows (kubelet contract: A4), so that its containers would wait for
their nodes for ever. `claim` does nothing where nothing is to be done. What an operator undoes later is left alone.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Set
from functools import partial
from typing import Any, Final

import anyio
import structlog

from agent.claims.ledger import Ledger
from agent.discovery import backend_answers
from agent.hardware.queue import HangsError, HardwareQueue
from agent.inventory.inventory import Inventory
from agent.model import REPLACED, Held, SlotKey
from agent.runtime.errors import words
from agent.runtime.problems import Problems, Trouble
from agent.runtime.short_steps import in_batches
from agent.runtime.workers import LIMIT, NoWorkerError, Workers
from backends.base import AllocationRefused, Backend, Device, Grant, Resource

RESUME_DEADLINE: Final = 60.0
"""Seconds that a backend may take to make one device ready before it is reported."""

_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0  # seconds before what failed, or was not there, is tried again, doubling

log = structlog.get_logger()


class Resumer:
    """The claims that were there before us."""

    def __init__(
        self,
        backends: Mapping[str, Backend[Any]],
        inventory: Inventory,
        ledger: Ledger,
        turns: HardwareQueue,
        look: Callable[[str, Set[str]], Awaitable[None]],
        is_known: Callable[[SlotKey], bool],
        problems: Problems | None = None,
    ) -> None:
        """Prepare.

        Args:
            backends: those in force now, by their kinds.
            inventory: what there is.
            ledger: who holds what.
            turns: who may act on it.
            look: looks at units of a backend once more.
            is_known: has the kubelet said that a pod has it? We remember pods that went while we were away, too.
            problems: is told what could not be made ready.
        """
        self._backends = backends
        self._inventory = inventory
        self._ledger = ledger
        self._turns = turns
        self._look = look
        self._is_known = is_known
        self._problems = problems or Problems()
        self._workers: defaultdict[str, Workers] = defaultdict(lambda: Workers("resume"))
        self._room: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(LIMIT))

    async def run(self, looked: Callable[[], Awaitable[None]]) -> None:
        """Until each of them is ready, or over; only where no other agent serves the node. `looked`: every backend has."""
        await looked()
        try:
            async with anyio.create_task_group() as tasks:
                async for batch in in_batches(self._ledger.held()):
                    for held in batch:
                        if self._may_need_claim(held):
                            tasks.start_soon(self._resume, held.slot)
        finally:
            for workers in self._workers.values():
                workers.close()

    async def _resume(self, slot: SlotKey) -> None:
        """Try until it is done, later and later."""
        delay, trouble = _RETRY_FIRST, None
        try:
            while (held := self._ledger.of(slot)) is not None:
                try:
                    async with self._room[held.backend]:
                        is_done = await self._claim(held)
                except Exception as error:  # noqa: BLE001  # whatever a backend raises; reported, once, and tried again
                    is_done, trouble = False, trouble or self._trouble_of(held)
                    is_told = isinstance(error, AllocationRefused | NoWorkerError | HangsError)
                    trouble.report_once(words(error), None if is_told else error)
                if is_done:
                    return
                await anyio.sleep(delay)
                delay = min(delay * 2, _RETRY_MOST)
        finally:
            if trouble is not None:
                trouble.healed()

    def _trouble_of(self, held: Held) -> Trouble:
        return self._problems.trouble(
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
        """Its resource, if the backend has anything to do for a pod that has it."""
        resource = self._inventory.resource(held.resource)
        if resource is None or resource.spec.backend != held.backend:
            return None
        return resource if backend_answers.needs_claim(self._backends[held.backend], resource) else None

    async def _claim(self, held: Held) -> bool:
        """Make it ready, if that is the backend's to do, and see what came of it; not yet if pod or device are not there.

        Raises:
            Exception: it could not be made ready.
        """
        resource, kind = self._needs_claim(held), held.backend
        if resource is None:
            return True
        async with self._turns.take_within(RESUME_DEADLINE, held.things) as turn:
            device = self._device(held)
            if device is None or not self._is_known(held.slot):
                return False
            if self._ledger.of(held.slot) != held or self._inventory.resource(held.resource) != resource:
                return False  # another since we wait
            call = partial(self._backends[kind].claim, resource, [Grant(held.id, device)])
            await turn.run(self._workers[kind], call)
        await self._look(kind, {device.unit})
        slot = self._inventory.slot(*held.slot)
        if slot is not None and slot.device not in (None, device):
            log.info("resumed", backend=kind, resource=held.resource, device=device.key)
        return True

    def _device(self, held: Held) -> Device | None:
        """What the pod was given, as it is now; the claim must name its hardware, so that nobody else acts on that."""
        slot = self._inventory.slot(*held.slot)
        if slot is None or slot.device is None or slot.health.reason == REPLACED:
            return None
        return slot.device if held.hardware or not slot.device.hardware else None
