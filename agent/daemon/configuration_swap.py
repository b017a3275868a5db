"""Puts another configuration into force: builds a second house beside the first, and moves in one step.

New instances of backends look at the node, and a new inventory decides who has what, while everything in force goes on.
Whatever fails until then leaves no trace but its report. The move is one step of the event loop, of assignments alone;
what hung or was left over in the old house goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

import anyio
from msgspec import Struct

from agent.config import DEFAULT_PATH, Config, ConfigError, ConfigProblem, Difference
from agent.daemon.discovery_runner import DiscoveryRunner
from agent.daemon.node import Node
from agent.daemon.reporting.list_warnings import ListWarnings
from agent.daemon.serving import Serving
from agent.discovery.discoverer import Discoverer
from agent.discovery.unit_state import Changes
from agent.hardware.adoption import Adopter
from agent.hardware.jobs import Jobs
from agent.inventory.inventory import Inventory
from agent.kubernetes.runner import KubernetesParts
from agent.runtime.chunked_work import BATCH, in_batches
from agent.runtime.workers import Workers
from backends.base import Backend

DECISION_DEADLINE: Final = 10.0
"""Seconds that it may take to decide who has what; 10,000 devices take less than one."""


class Change(Struct, frozen=True):
    """What a new configuration asks for."""

    difference: Difference
    backends: Mapping[str, Backend[Any]]
    """New instances of the backends whose resources changed, or which are stuck."""


class ConfigurationSwap(Struct):
    """The parts of the daemon that have to know."""

    config: Config
    """What is in force."""
    discovery: DiscoveryRunner
    serving: Serving
    adopter: Adopter
    list_warnings: ListWarnings
    kubernetes: KubernetesParts
    jobs: Jobs
    node: Node

    async def apply(self, change: Change) -> None:
        """Put the change from the configuration in force into force.

        Raises:
            ConfigError: it cannot be put into force, and nothing has changed.
            Exception: the same, unless `config` says otherwise: then not everybody has been told.
        """
        if change.difference or change.backends:
            await self._move(change)
            self.kubernetes.configure(self.config.kubernetes)
            self.node.dra.configure(self.config)
            self.node.cdi.changed(self.node.inventory.names())
        else:
            self.config = change.difference.config
        self.node.tasks.start_soon(self.adopter.adopt_what_is_new)

    async def _move(self, change: Change) -> None:
        """Build the second house, and move in."""
        difference = change.difference
        async with self.discovery.beside(change.backends, difference.config.agent) as fresh:
            kinds = {resource.spec.backend for resource in difference.config.resources}
            every = {kind: it for kind, it in (self.discovery.discoverers | fresh).items() if kind in kinds}
            inventory = await self._decide(difference.config, every)

            # no await from here on: every reader sees one configuration or the other
            found = [it.take_over(self.discovery.discoverers.get(kind)) for kind, it in fresh.items()]
            found += [it.nothing_left() for kind, it in self.discovery.discoverers.items() if kind not in kinds]
            self._known(inventory, every)()  # what happened while it was decided
            self._refuse_broken(difference.config, inventory)
            for discoverer in fresh.values():
                discoverer.watches()

            self.node.inventory.become(inventory, fresh.keys())
            self.discovery.exchange(every)
            self.config = difference.config
            await self._tell(difference, fresh, found)

    async def _decide(self, config: Config, every: Mapping[str, Discoverer]) -> Inventory:
        """An inventory for the configuration that knows what is known now; made in a thread.

        Raises:
            Exception: it cannot be made; a TimeoutError where a backend hangs that is asked for IDs.
        """
        backends = {kind: it.backend for kind, it in every.items()}
        inventory = Inventory(config.resources, backends, self.node.inventory.selection)
        workers = Workers("reload", 1)
        try:
            with anyio.fail_after(DECISION_DEADLINE):
                await workers.start(self._known(inventory, every))
        finally:
            workers.close()
        return inventory

    def _refuse_broken(self, config: Config, inventory: Inventory) -> None:
        """Refuse resources whose devices would have no IDs any more.

        Raises:
            ConfigError: there are such.
        """
        broken, before = inventory.selection.broken, self.node.inventory.selection.broken
        if fresh := [f"{name}: {why}" for name, why in broken.items() if name not in before]:
            raise ConfigError(tuple(ConfigProblem(config.source or DEFAULT_PATH, None, "", why) for why in fresh))

    def _known(self, inventory: Inventory, every: Mapping[str, Discoverer]) -> Callable[[], None]:
        """Has an inventory learn all there is to know now, seen by these."""
        units = {kind: dict(it.known.items()) for kind, it in every.items()}
        links = {kind: it.links() for kind, it in every.items()}
        return partial(inventory.learn, units, links, *self.node.inventory.told())

    async def _tell(self, difference: Difference, fresh: Mapping[str, Discoverer], found: Iterable[Changes]) -> None:
        """Tell all parts of the new configuration; no list is sent before its health is known."""
        self.discovery.listen()
        for discoverer in fresh.values():
            discoverer.rescan()  # what happened since it looked
        try:
            for changes in found:
                async for (part,) in in_batches(changes.in_parts(BATCH), 1):
                    self.node.judge(part)
                self.discovery.sight_soon(changes)
        finally:
            self.node.ready(fresh)
        resources = self.node.inventory.selection.in_force()
        self.serving.configure(it.name for it in resources if it.configured in difference.new)
        self.jobs.close()  # threads that only backends of before needed
        self.list_warnings.tell_of_selectors(it for it in difference.config.resources if it.name in difference.new)
        self.adopter.configure(it for it in resources if it.configured not in difference.new)
