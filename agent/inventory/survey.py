"""Looks at the node once without a kubelet: what each resource would offer, what no resource takes, what is wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio
from msgspec import Struct, field
from msgspec.structs import replace

from agent.discovery.discoverer import Discoverer
from agent.discovery.reading import Changes
from agent.health import HealthBook
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import unmatched
from backends.base import Backend, Device, Problem, Resource

PATIENCE: Final = 10.0
"""Seconds for each backend, where a person waits."""


class Survey(Struct, frozen=True):
    """What was found."""

    inventory: Inventory
    health: HealthBook
    problems: tuple[tuple[str, Problem], ...]
    """Each with its backend."""
    problems_of: Mapping[tuple[str, str], tuple[Problem, ...]]
    """Those that a unit has, by backend and unit."""
    selectable: Mapping[str, Sequence[Device]] = field(default_factory=dict)
    """Of each backend whose scan has ended, what selectors could mean."""


async def survey(resources: Sequence[Resource[Any]], backends: Mapping[str, Backend[Any]], patience: float) -> Survey:
    """Look at everything once, as the daemon does; a backend gets `patience` seconds.

    One look cannot tell for how long a port has been down: what is delayed is taken to last.
    """
    inventory, health = Inventory(resources, backends), HealthBook()

    def digest(changes: Changes) -> None:
        inventory.update(changes.backend, changes.units, changes.links)
        lasting = {unit: [replace(signal, after=0.0) for signal in said] for unit, said in changes.signals.items()}
        inventory.set_health(health.probed(changes.backend, lasting, time.monotonic()))

    discoverers = [Discoverer(kind, backend, digest) for kind, backend in backends.items()]
    problems: list[tuple[str, Problem]] = []
    async with anyio.create_task_group() as tasks:
        for discoverer in discoverers:
            tasks.start_soon(discoverer.run)
        with anyio.move_on_after(patience):
            for discoverer in discoverers:
                await discoverer.first_scan.wait()
        for discoverer in discoverers:
            problems += [(discoverer.kind, found) for of_unit in discoverer.problems.values() for found in of_unit]
            if not discoverer.first_scan.is_set():
                slow = Problem(
                    discoverer.kind, f"its scan did not end within {patience:g} s; what is shown may be incomplete"
                )
                problems.append((discoverer.kind, slow))
        tasks.cancel_scope.cancel()
    scanned = {it.kind: it.selectable() for it in discoverers if it.first_scan.is_set()}
    problems_of = {(it.kind, unit): of_unit for it in discoverers for unit, of_unit in it.problems.items()}
    return Survey(inventory, health, (*problems, *unmatched(resources, scanned)), problems_of, scanned)
