"""Prepares hardware that joins a resource (binds drivers, creates functions): the daemon does this, `discover` never does.

A device that is new in a list, or has changed, is adopted in a thread, in turn with what else acts on its hardware;
what fails is told once and tried again later and later. A device that has left its list is nobody's business any more.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio
import structlog
from anyio.abc import TaskGroup

from agent.discovery.backend_answers import ask
from agent.hardware.queue import HangsError, HardwareQueue
from agent.model import Slot, SlotKey, Snapshot
from agent.runtime.errors import words
from agent.runtime.problems import Problems, Trouble
from agent.runtime.workers import LIMIT, NoWorkerError, Workers
from backends.base import Backend, Device, NotReady, Resource

ADOPT_DEADLINE: Final = 60.0
"""Seconds that a backend may take to make one device ready before it is reported."""

_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0  # seconds before what failed is tried again, doubling

log = structlog.get_logger()


class _ExchangedError(Exception):
    """The device is gone, or another, since its turn was waited for."""


@dataclass(slots=True)
class _Case:
    """A device in a list of ours."""

    device: Device
    done: Device | None = None
    """As it was when it was last made ready; a device that differs is looked after again."""
    at: float = -math.inf
    """When to try; seconds on the monotonic clock."""
    delay: float = 0.0
    trouble: Trouble | None = None
    under_way: bool = False
    queued: float = math.inf
    """The time under which it stands in the queue; infinite: not at all."""


class Adopter:
    """The devices of those backends that adopt any."""

    def __init__(
        self,
        backends: Mapping[str, Backend[Any]],
        turns: HardwareQueue,
        look: Callable[[str, Set[str]], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        problems: Problems | None = None,
    ) -> None:
        """Prepare; `backends` are those in force now, and `look` looks at units of a backend once more."""
        self._wanting: dict[str, Resource[Any]] = {}
        self._backends = backends
        self._turns = turns
        self._look = look
        self._clock = clock
        self._problems = problems or Problems()
        self._cases: dict[SlotKey, _Case] = {}
        self._queue: list[tuple[float, SlotKey]] = []  # a heap: when to look at which; what is outdated is passed over
        self._acting = 0
        self._workers: defaultdict[str, Workers] = defaultdict(lambda: Workers("adopt"))
        self._news = asyncio.Event()

    def configure(self, resources: Iterable[Resource[Any]], slots: Callable[[str], Mapping[str, Slot]]) -> None:
        """These are the resources now, with these slots: whatever is listed by one that is new or another is adopted."""
        before = self._wanting
        self._wanting = {r.name: r for r in resources if _adopts(self._backends[r.spec.backend], r)}
        anew = {name for name, resource in self._wanting.items() if resource != before.get(name)}
        for key in [key for key in self._cases if key[0] not in self._wanting or key[0] in anew]:
            self._forget(key)
        for name in anew:
            for device_id, slot in slots(name).items():
                self._note((name, device_id), slot)
        self._news.set()

    def listed(self, snapshot: Snapshot) -> None:
        """A resource's list is this from now on."""
        if snapshot.resource not in self._wanting:
            return
        changed = snapshot.changed
        for device_id in self._all_of(snapshot) if changed is None else changed:
            self._note((snapshot.resource, device_id), snapshot.slots.get(device_id))
        self._news.set()

    def _all_of(self, snapshot: Snapshot) -> Set[str]:
        return snapshot.slots.keys() | {device_id for name, device_id in self._cases if name == snapshot.resource}

    def _note(self, key: SlotKey, slot: Slot | None) -> None:
        if slot is None or slot.device is None:
            self._forget(key)
            return
        case = self._cases.setdefault(key, _Case(slot.device, delay=_RETRY_FIRST))
        if case.device != slot.device:
            case.device, case.at, case.delay = slot.device, -math.inf, _RETRY_FIRST
        self._enqueue(key, case)

    def _forget(self, key: SlotKey) -> None:
        case = self._cases.pop(key, None)
        if case is not None and case.trouble is not None:
            case.trouble.healed()

    def _enqueue(self, key: SlotKey, case: _Case) -> None:
        """Have it tried when its time comes, if it is to be tried at all."""
        if case.at < case.queued and _is_due(case):
            case.queued = case.at
            heapq.heappush(self._queue, (case.at, key))

    def complaints(self) -> dict[SlotKey, str]:
        """The slots whose device could not be made ready, and why."""
        return {slot: case.trouble.reason for slot, case in self._cases.items() if case.trouble is not None}

    async def run(self) -> None:
        """Adopt what is listed, and what comes to be, until cancelled; only where no other agent serves the node."""
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    self._news.clear()
                    self._begin(tasks)
                    pause = max(0.0, self._queue[0][0] - self._clock()) if self._queue and not self._is_full() else None
                    with anyio.move_on_after(pause):
                        await self._news.wait()
        finally:
            for workers in self._workers.values():
                workers.close()

    def _is_full(self) -> bool:
        return self._acting >= LIMIT

    def _begin(self, tasks: TaskGroup) -> None:
        now = self._clock()
        while self._queue and not self._is_full() and self._queue[0][0] <= now:
            at, key = heapq.heappop(self._queue)
            case = self._cases.get(key)
            if case is None or case.queued != at:
                continue  # it is gone, or stands elsewhere in the queue
            case.queued = math.inf
            if _is_due(case):
                case.under_way = True
                self._acting += 1
                tasks.start_soon(self._try, key, case)

    async def _try(self, key: SlotKey, case: _Case) -> None:
        device, resource = case.device, self._wanting.get(key[0])
        try:
            if resource is None or self._cases.get(key) is not case:
                return  # it is configured otherwise since a moment ago
            acted = await self._adopt(resource, device, lambda: self._cases.get(key) is case and case.device == device)
        except _ExchangedError:
            pass  # what is there now is tried next
        except Exception as error:  # noqa: BLE001  # whatever a backend raises; reported, once, and tried again
            assert resource is not None
            self._failed(resource, key, case, error)
        else:
            if acted or case.trouble is not None:
                log.info("adopted", backend=resource.spec.backend, resource=resource.name, device=device.key)
            if case.trouble is not None:
                case.trouble.healed()
            case.done, case.trouble, case.delay = device, None, _RETRY_FIRST
        finally:
            case.under_way = False
            self._acting -= 1
            if self._cases.get(key) is case:
                self._enqueue(key, case)
            self._news.set()

    async def _adopt(self, resource: Resource[Any], device: Device, is_there: Callable[[], bool]) -> bool:
        """Make it ready, and see what came of it.

        Raises:
            Exception: it could not be made ready, or is not what is there any more.
        """
        kind = resource.spec.backend
        call = partial(self._backends[kind].adopt, resource, device)
        # what comes back is adopted each time: that must not excuse its going again
        async with self._turns.take_within(ADOPT_DEADLINE, device.hardware, moves=False) as turn:
            if not is_there():
                raise _ExchangedError
            acted = await turn.run(self._workers[kind], call)
        if acted:
            await self._look(kind, {device.unit})
        return acted

    def _failed(self, resource: Resource[Any], key: SlotKey, case: _Case, error: Exception) -> None:
        case.at, case.delay = self._clock() + case.delay, min(case.delay * 2, _RETRY_MOST)
        if self._cases.get(key) is not case:
            return  # it has gone meanwhile
        if case.trouble is None:
            case.trouble = self._problems.trouble(
                "adoption",
                f"{case.device.key} could not be made ready for {resource.name}",
                "not-adopted",
                backend=resource.spec.backend,
                resource=resource.name,
                device=case.device.key,
                then="trying again later and later",
            )
        is_told = isinstance(error, NotReady | NoWorkerError | HangsError)
        case.trouble.report_once(words(error), None if is_told else error)


def _is_due(case: _Case) -> bool:
    return not case.under_way and case.done != case.device


def _adopts(backend: Backend[Any], resource: Resource[Any]) -> bool:
    """Does the backend adopt devices of this resource? One that raises is asked nothing more."""
    try:
        return bool(ask(lambda: backend.adopts(resource)))
    except Exception:
        log.exception("backend-failed", backend=resource.spec.backend, call="adopts", resource=resource.name)
        return False
