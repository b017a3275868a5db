"""A node with devices by dynamic resource allocation, its publisher, and an API server that is asked by calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from msgspec.structs import replace

from agent.dra.names import device_name
from agent.dra.publisher import Publisher, Settings
from agent.dra.slices import Eviction
from agent.inventory.inventory import Inventory
from agent.model import Health, Held, ResourceClaim
from agent.runtime.counts import Counts
from agent.runtime.problems import Problems
from agent.simulation.api_server import Objects
from backends.base import Backend, Device, Resource
from tests.fakes import KIND, Fake, by_unit, resource
from tests.objects import CalledObjects
from tests.wait import settled

DRIVER, NODE = "fairlead.dev", "worker-1"


def claimed(name: str, replicas: int = 1) -> Resource[Any]:
    """A resource that is served by dynamic resource allocation."""
    it = resource(name, replicas=replicas)
    return replace(it, spec=replace(it.spec, serve="dra"))


def by_claim(held: Held, uid: str = "claim-1") -> Held:
    """The same, held by a ResourceClaim."""
    return replace(held, claim=ResourceClaim(uid, "default", "claim", "", device_name(held.id)))


class Stage:
    """The parts, and what a test does with them."""

    def __init__(
        self,
        *resources: Resource[Any],
        no_execute: tuple[str, ...] = (),
        after: float = 300.0,
        record: Callable[[frozenset[str]], Awaitable[bool]] | None = None,
        recorded: Iterable[str] = (),
    ) -> None:
        self.backends: dict[str, Backend[Any]] = {KIND: Fake(*resources)}
        self.inventory = Inventory(resources, self.backends)
        self.objects = Objects(NODE)
        self.api = CalledObjects(self.objects)
        self.problems, self.counts = Problems(), Counts()
        self.clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()
        settings = Settings(DRIVER, NODE, frozenset(no_execute), Eviction(after, 1))
        known = self.inventory, self.backends, self.problems, self.counts
        self.publisher = Publisher(settings, *known, recorded, record, clock=self.clock)

    def find(self, *devices: Device) -> None:
        """A scan has found these, and no others in their units."""
        self.inventory.update(KIND, by_unit(devices))
        self.inventory.ready(KIND)
        self.publisher.changed()

    def say(self, hardware: str, health: Health) -> None:
        """Hardware is like this from now on."""
        self.inventory.set_health({hardware: replace(health, since=self.clock())})
        self.publisher.changed()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The publisher runs."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.publisher.watch, self.api)
            tasks.start_soon(self.publisher.run, self.api)
            await settled()
            yield
            tasks.cancel_scope.cancel()

    def shown(self, name: str) -> dict[str, str]:
        """What a scheduler sees of a resource: its devices, each with its taints."""
        pool = self.objects.pool(f"{NODE}/{name}")
        return {
            it["name"]: ",".join(f"{t['key']}={t['value']}:{t['effect']}" for t in it.get("taints", ())) for it in pool
        }
