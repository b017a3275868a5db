"""Logs what is odd about the lists and their configuration, each oddity once: what they lack, leave out or cannot tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import anyio
import structlog

from agent.daemon.node import Node
from agent.daemon.reporting.device_log import LOGGED_AT_MOST
from agent.inventory.device_names import name_of
from agent.inventory.unmatched import unmatched
from agent.kubernetes.runner import KubernetesParts
from agent.model import Snapshot
from agent.runtime import limits
from agent.runtime.pacing import Doorbell
from agent.runtime.supervision.problems import Problems, Troubles
from backends.base import Resource

_PAUSE: Final = 1.0
"""Seconds between two looks at what is missing: a device whose driver is rebound is missing for a moment."""
_SELDOM: Final = 3600.0  # seconds after which what went long ago may be forgotten, though nothing happens

log = structlog.get_logger()


class ListWarnings:
    """Remembers what it has logged."""

    def __init__(self, node: Node, kubernetes: KubernetesParts) -> None:
        """Prepare; `kubernetes` is told what is not offered, too."""
        self._node, self._kubernetes = node, kubernetes
        own, kind = Problems(), node.inventory.selection.kind  # every face has what is wrong with a resource beside it
        self._broken = Troubles(
            lambda it: own.trouble(
                "", f"{it} is broken", "resource-broken", level="error", resource=it, backend=kind(it)
            )
        )
        self._cut = Troubles(
            lambda it: own.trouble(
                "", f"the list of {it} is cut", "list-too-long", "list-fits-again",
                level="error", resource=it, count=0, limit=limits.MESSAGE_LIMIT,
            )
        )  # fmt: skip
        self._changed = Doorbell()

    async def run(self) -> None:
        """Tell what is missing, and what is not any more, as it changes."""
        await anyio.sleep(_PAUSE)
        while True:
            looked = {kind for kind, it in self._node.discoverers.items() if not it.unseen()}
            told, ended = await self._node.shortfall.look(looked)
            await self._node.keeper.write_offered()
            for it in told[:LOGGED_AT_MOST]:
                log.warning(
                    "device-not-offered", resource=it.resource, backend=it.backend, device=it.device,
                    called=name_of(it.seen.attributes), reason=it.message,
                )  # fmt: skip
            more = Counter(it.resource for it in told[LOGGED_AT_MOST:])
            for resource, count in more.items():
                log.warning("devices-not-offered", resource=resource, count=count)
            for it in ended[:LOGGED_AT_MOST]:
                name = name_of(it.seen.attributes)
                log.info(
                    "device-offered-again", resource=it.resource, backend=it.backend, device=it.device, called=name
                )
            self._kubernetes.missing(told[:LOGGED_AT_MOST], more, ended[:LOGGED_AT_MOST])
            await self._changed.rung(_SELDOM, gather=_PAUSE)

    def devices_changed(self) -> None:
        """Say which resources' backends failed on a device, and how; what is missing may be another."""
        self._changed.set()
        self._broken.tell(self._node.inventory.selection.broken)

    def tell_of_selectors(self, resources: Iterable[Resource[Any]]) -> None:
        """Say which of them match nothing; hardware may come later, a misspelt word does not go away."""
        self._changed.set()  # the backends have looked: what an earlier run had offered may be found to be gone
        scanned = {kind: it.selectable() for kind, it in self._node.discoverers.items() if it.first_scan.is_set()}
        for kind, problem in unmatched(resources, scanned):
            log.warning("selector-matches-nothing", resource=problem.subject, backend=kind, reason=problem.sentence)

    def tell_of_length(self, snapshot: Snapshot) -> None:
        """Report the IDs that are left out of a list; again when they are more or fewer."""
        if omitted := snapshot.omitted:
            self._cut[snapshot.resource].report_once(f"{omitted} IDs are left out", count=omitted)
        else:
            self._cut.heal(snapshot.resource)
