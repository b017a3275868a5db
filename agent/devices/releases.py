"""Has backends undo what they did for pods that are gone; triggered by the ledger alone.

A claim outlives its device, and its resource's configuration: a backend that only a claim names is made for it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import structlog

from agent.devices.claims import Ledger
from agent.devices.model import Held
from agent.devices.workers import NoWorkerError, Workers
from backends import registry
from backends.base import Backend, Host, Released

RELEASE_DEADLINE: Final = 30.0
"""Seconds that a backend may take to undo a claim before it is reported."""

log = structlog.get_logger()


class Releaser:
    """Calls `release`, in a thread of its own for each backend."""

    def __init__(self, host: Host, backends: Mapping[str, Backend[Any]], ledger: Ledger) -> None:
        self._host = host
        self._backends = dict(backends)
        self._ledger = ledger
        self._workers: defaultdict[str, Workers] = defaultdict(lambda: Workers("release"))

    async def release(self, ended: Sequence[Held]) -> None:
        """Tell each backend which of its claims have ended, and which hardware nobody holds any more."""
        by_kind: defaultdict[str, list[Held]] = defaultdict(list)
        for held in ended:
            by_kind[held.backend].append(held)
        await asyncio.gather(*(self._release_of(kind, claims) for kind, claims in by_kind.items()))

    async def _release_of(self, kind: str, ended: list[Held]) -> None:
        try:
            backend = self._backend(kind)
            if type(backend).release is Backend.release:
                return
            hardware = frozenset(h for held in ended for h in held.hardware)
            idle = frozenset(h for h in hardware if not self._ledger.holds(h))
            released = [Released(held.resource, held.id, held.hardware) for held in ended]
            async with asyncio.timeout(RELEASE_DEADLINE):
                await self._workers[kind].start(partial(backend.release, released, idle))
        except (TimeoutError, NoWorkerError):
            log.warning("release-hangs", backend=kind, ids=[held.id for held in ended], waited=RELEASE_DEADLINE)
        except Exception:
            log.exception("release-failed", backend=kind, ids=[held.id for held in ended])

    def _backend(self, kind: str) -> Backend[Any]:
        if kind not in self._backends:
            self._backends[kind] = registry.load(kind)(self._host, ())
        return self._backends[kind]
