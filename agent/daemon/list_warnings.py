"""Logs what is odd about the lists and their configuration, each oddity once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from agent.discovery.discoverer import Discoverer
from agent.inventory.inventory import Inventory
from agent.inventory.unmatched import unmatched
from agent.runtime import limits
from backends.base import Resource

log = structlog.get_logger()


class ListWarnings:
    """What has been said."""

    def __init__(self, inventory: Inventory, discoverers: Mapping[str, Discoverer]) -> None:
        self._inventory = inventory
        self._discoverers = discoverers
        self._omitted: dict[str, int] = {}
        self._broken: dict[str, str] = {}

    def tell_of_selectors(self, resources: Iterable[Resource[Any]]) -> None:
        """Say which of them match nothing; hardware may come later, a misspelt word does not go away."""
        scanned = {kind: it.selectable() for kind, it in self._discoverers.items() if it.first_scan.is_set()}
        for kind, problem in unmatched(resources, scanned):
            log.warning("selector-matches-nothing", resource=problem.subject, backend=kind, reason=problem.sentence)

    def tell_of_failures(self) -> None:
        """Say which resources' backends failed on a device, and how."""
        configured = self._inventory.selection
        for name, why in configured.broken.items() - self._broken.items():
            log.error("resource-broken", resource=name, backend=configured.kind(name), reason=why)
        self._broken = dict(configured.broken)

    def tell_of_length(self, resource: str) -> None:
        """Say when more or fewer IDs are left out than before, loudly."""
        omitted = self._inventory.omitted(resource)
        if omitted != self._omitted.get(resource, 0):
            log.error("list-too-long", resource=resource, count=omitted, limit=limits.MESSAGE_LIMIT)
        self._omitted[resource] = omitted
