"""Has backends undo what they did for pods that ended, and tries until it works; only the ledger triggers it.

A claim outlives its device, and its resource's configuration: a backend that only a claim names is made for it. What
could not be undone is tried again later and later, also by our next run, unless the slot is claimed again: then the
end of that claim will see to it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import anyio

from agent.claims.ledger import Ledger, names_of
from agent.discovery.backend_answers import ask
from agent.hardware.queue import HangsError, HardwareQueue, Turn
from agent.model import Held, SlotKey
from agent.runtime.errors import words
from agent.runtime.problems import Problems
from agent.runtime.workers import LIMIT, NoWorkerError, Workers
from backends import registry
from backends.base import Backend, Host, Released

RELEASE_DEADLINE: Final = 30.0
"""Seconds that a backend may take to undo a claim before it is reported."""

_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0  # seconds before what could not be undone is tried again, doubling


class Releaser:
    """What has to be undone yet; calls `release`, in threads of its own for each backend."""

    def __init__(
        self,
        host: Host,
        backends: Mapping[str, Backend[Any]],
        ledger: Ledger,
        turns: HardwareQueue,
        changed: Callable[[], None] = lambda: None,
        problems: Problems | None = None,
    ) -> None:
        """Prepare; `backends` are those in force now, and `changed` is called when something has been undone."""
        self._host = host
        self._backends = backends
        self._unconfigured: dict[str, Backend[Any]] = {}
        self._ledger = ledger
        self._turns = turns
        self._changed = changed
        self._problems = problems or Problems()
        self._pending: dict[SlotKey, Held] = {}
        self._under_way: set[SlotKey] = set()
        self._news = asyncio.Event()
        self._workers: defaultdict[str, Workers] = defaultdict(lambda: Workers("release"))
        self._room: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(LIMIT))

    def pending(self) -> tuple[Held, ...]:
        """What must outlive our end: the claims that are over and not undone."""
        return tuple(self._pending.values())

    def add(self, ended: Iterable[Held]) -> None:
        """Nobody holds these any more."""
        for held in ended:
            if self._undoes(held.backend):
                self._pending[held.slot] = held
        self._news.set()

    def _undoes(self, kind: str) -> bool:
        """Has the backend anything to undo? Of one that is not made yet it will be seen."""
        backend = self._backends.get(kind) or self._unconfigured.get(kind)
        return backend is None or type(backend).release is not Backend.release

    async def run(self) -> None:
        """Undo what is pending, and what comes to it, until cancelled; only where no other agent serves the node."""
        self._under_way.clear()
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    self._news.clear()
                    fresh = [held for slot, held in self._pending.items() if slot not in self._under_way]
                    for kind, slots in _together(fresh):
                        self._under_way |= slots
                        tasks.start_soon(self._undo, kind, slots)
                    await self._news.wait()
        finally:
            for workers in self._workers.values():
                workers.close()

    async def _undo(self, kind: str, slots: frozenset[SlotKey]) -> None:
        """Try until it is done."""
        delay = _RETRY_FIRST
        names = ", ".join(names_of(slots))
        trouble = self._problems.trouble(
            "releases",
            f"what was done for a pod that had {names} could not be undone",
            "release-failed",
            "release-succeeded",
            backend=kind,
            slots=names_of(slots),
            then="trying again later and later",
        )
        while ended := [self._pending[slot] for slot in sorted(slots) if slot in self._pending]:
            try:
                async with self._room[kind]:
                    await self._release(kind, ended)
            except Exception as error:  # noqa: BLE001  # whatever a backend raises; reported, once, and tried again
                if not isinstance(error, NoWorkerError):  # the ones that hang have been said
                    trouble.report_once(words(error), None if isinstance(error, HangsError) else error)
                await anyio.sleep(delay)
                delay = min(delay * 2, _RETRY_MOST)
        trouble.healed()
        self._under_way -= slots
        self._changed()

    async def _release(self, kind: str, ended: Sequence[Held]) -> None:
        """Try once, when nobody else acts on this hardware.

        Raises:
            Exception: it did not work.
        """
        backend = self._backend(kind)
        things = frozenset[Hashable]().union(*(held.things for held in ended))
        async with self._turns.take_within(RELEASE_DEADLINE, things) as turn:
            await self._in_turn(turn, kind, backend, ended)
        for held in ended:
            if self._pending.get(held.slot) is held:
                del self._pending[held.slot]

    async def _in_turn(self, turn: Turn, kind: str, backend: Backend[Any], ended: Sequence[Held]) -> None:
        """Only what the ledger says now counts: a claim may have begun while we waited."""
        over = [held for held in ended if not self._ledger.has(held.slot)]
        if not over or type(backend).release is Backend.release:
            return
        hardware = frozenset(h for held in over for h in held.hardware)
        idle = frozenset(h for h in hardware if not self._ledger.holds(h))
        released = [Released(held.resource, held.id, held.hardware) for held in over]
        await turn.run(self._workers[kind], partial(backend.release, released, idle))

    def _backend(self, kind: str) -> Backend[Any]:
        if (configured := self._backends.get(kind)) is not None:
            return configured
        if kind not in self._unconfigured:
            self._unconfigured[kind] = ask(lambda: registry.load(kind)(self._host, ()))
        return self._unconfigured[kind]


def _together(ended: Iterable[Held]) -> list[tuple[str, frozenset[SlotKey]]]:
    """Those of one backend that share hardware in one call, the others each in its own: none waits for another."""
    left, beside = {held.slot: held for held in ended}, defaultdict[tuple[str, Hashable], list[Held]](list)
    for held in left.values():
        for thing in held.things:
            beside[held.backend, thing].append(held)
    pieces = []
    while left:
        piece = [left.popitem()[1]]
        for held in piece:  # which grows meanwhile
            for thing in held.things:
                piece += [o for o in beside.pop((held.backend, thing), ()) if left.pop(o.slot, None) is not None]
        pieces.append((piece[0].backend, frozenset(held.slot for held in piece)))
    return pieces
