"""One look at the node without a kubelet: what every resource would offer, what nobody takes, what is wrong."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from agent.devices.discovery import Discoverer, News
from agent.devices.health import HealthBook
from agent.devices.inventory import Inventory
from backends.base import Backend, Problem, Resource


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found."""

    inventory: Inventory
    problems: tuple[tuple[str, Problem], ...]
    """Each with its backend."""


async def survey(resources: Sequence[Resource[Any]], backends: Mapping[str, Backend[Any]], patience: float) -> Survey:
    """Look at everything once, as the daemon does; a backend gets `patience` seconds."""
    inventory, health = Inventory(resources, backends), HealthBook()

    def digest(news: News) -> None:
        inventory.update(news.backend, news.units)
        inventory.set_health(health.probed(news.backend, news.signals, time.monotonic()))

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
    return Survey(inventory, tuple(problems))
