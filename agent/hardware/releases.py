"""Undoes through backends what was done for pods that ended, until it works; only the ledger triggers it.

A claim outlives its device, and its resource's configuration: a backend that only a claim names is made for it. What
could not be undone is tried again, also by our next run, unless the slot is claimed again: then the end of that claim
will see to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from agent.claims.ledger import Ledger, names_of
from agent.discovery.backend_answers import ask
from agent.hardware.reconciler import Reconciler, Want
from agent.model import Held, SlotKey
from agent.runtime.problems import Trouble
from agent.runtime.workers import Workers
from backends import registry
from backends.base import Backend, Host, Released

RELEASE_DEADLINE: Final = 30.0
"""Seconds that a backend may take to undo a claim before it is reported."""


class Releaser:
    """Keeps the ended claims that are not undone yet, and calls `release` for them."""

    def __init__(
        self,
        host: Host,
        backends: Mapping[str, Backend[Any]],
        ledger: Ledger,
        reconciler: Reconciler,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; `backends` are those in force now, and `changed` is called when something has been undone."""
        self._host = host
        self._backends = backends
        self._unconfigured: dict[str, Backend[Any]] = {}
        self._ledger = ledger
        self._reconciler = reconciler
        self._changed = changed
        self._pending: dict[SlotKey, Held] = {}
        self._groups: dict[SlotKey, frozenset[SlotKey]] = {}  # pending → what is undone in one call with it

    def pending(self) -> tuple[Held, ...]:
        """The claims that have ended and are not undone yet, which must outlive the process."""
        return tuple(self._pending.values())

    def add(self, ended: Iterable[Held]) -> None:
        """Undo these claims, which have ended."""
        undoable = [held for held in ended if self._undoes(held.backend)]
        self._pending.update((held.slot, held) for held in undoable)
        for kind, slots in _together(held for held in undoable if held.slot not in self._groups):
            self._groups.update(dict.fromkeys(slots, slots))
            attempt, trouble = partial(self._undo, kind, slots), partial(self._trouble, kind, slots)
            self._reconciler.want(("release", slots), Want(f"release {kind}", attempt, trouble))

    def _undoes(self, kind: str) -> bool:
        """Whether the backend undoes anything. A backend that is not made yet may."""
        backend = self._backends.get(kind) or self._unconfigured.get(kind)
        return backend is None or type(backend).release is not Backend.release

    async def _undo(self, kind: str, slots: frozenset[SlotKey], workers: Workers) -> bool:
        """Undo those of these claims that are still pending.

        Raises:
            Exception: it did not work.
        """
        backend = self._backend(kind)
        while ended := [self._pending[slot] for slot in sorted(slots) if slot in self._pending]:
            things = frozenset[Hashable]().union(*(held.things for held in ended))
            async with self._reconciler.turns.take_within(RELEASE_DEADLINE, things) as turn:
                # only what the ledger says now counts: a claim may have begun while we waited
                over = [held for held in ended if not self._ledger.has(held.slot)]
                if over and type(backend).release is not Backend.release:
                    hardware = frozenset(h for held in over for h in held.hardware)
                    idle = frozenset(h for h in hardware if not self._ledger.holds(h))
                    released = [Released(held.resource, held.id, held.hardware) for held in over]
                    await turn.run(workers, partial(backend.release, released, idle))
            for held in ended:
                if self._pending.get(held.slot) is held:  # else it has ended once more meanwhile
                    del self._pending[held.slot]
        for slot in slots:
            del self._groups[slot]
        self._changed()
        return True

    def _trouble(self, kind: str, slots: frozenset[SlotKey]) -> Trouble:
        names = names_of(slots)
        return self._reconciler.problems.trouble(
            "releases",
            f"what was done for a pod that had {', '.join(names)} could not be undone",
            "release-failed",
            "release-succeeded",
            backend=kind,
            slots=names,
            then="trying again later and later",
        )

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
        for held in piece:  # it grows meanwhile
            for thing in held.things:
                piece += [o for o in beside.pop((held.backend, thing), ()) if left.pop(o.slot, None) is not None]
        pieces.append((piece[0].backend, frozenset(held.slot for held in piece)))
    return pieces
