"""A driver on sockets of its own beside a simulated kubelet, with the claims that an API server has."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from agent.cdi.on_demand import Cdi
from agent.claims.ledger import Ledger
from agent.dra.driver import Driver, DriverConfig
from agent.dra.names import pool_name
from agent.dra.preparation import House
from agent.hardware.jobs import HardwareQueue, Jobs
from agent.inventory.inventory import Inventory
from agent.kubelet.allocation import Allocator, Starter
from agent.kubernetes.api import ApiError
from agent.model import HEALTHY, Health, Held, State
from agent.runtime.counts import Counts
from agent.runtime.problems import Problems
from agent.simulation.clock import Clock
from agent.simulation.dra import ClaimKey, Drivers, Instance
from agent.simulation.kubelet import Kubelet
from backends.base import Device, Grant, Host, HostPath, Node, PreStart, Resource, ResourceSpec
from tests.background import running
from tests.kubelet.test_allocation import KIND, Claiming, Options
from tests.wait import limit, until

DRIVER: Final = "fairlead.example.com"
NODE: Final = "worker-1"
TOY: Final = "example.com/toy"
POOL: Final = pool_name(NODE, TOY)
SHARED: Final = "example.com/shared"
FAST: Final = 500.0  # seconds of the kubelet's clock in one of ours


def toy(key: str, **more: Any) -> Device:
    nodes = (Node(HostPath(f"/dev/{key}"), f"/dev/{key}", "rw"),)
    return replace(Device(key, key, frozenset({f"toy:{key}"}), nodes=nodes), **more)


class Resetting(Claiming):
    """Also resets, where a resource asks for it."""

    def prepare(self, resource: Resource[Options], grants: Sequence[Grant]) -> frozenset[str]:
        self.asked.append(("prepare", [grant.id for grant in grants]))
        return frozenset().union(*(grant.device.hardware for grant in grants))


class Api:
    """The ResourceClaims of an API server."""

    def __init__(self) -> None:
        self.claims: dict[tuple[str, str], dict[str, Any]] = {}
        self.away = ""
        self.asked = 0

    def allocate(self, name: str, *devices: str, uid: str = "", pool: str = POOL, **more: Any) -> ClaimKey:
        """The scheduler allocates these devices to a claim of this name, one for each of its requests."""
        results = [
            {"request": f"r{n}", "driver": DRIVER, "pool": pool, "device": device, **more}
            for n, device in enumerate(devices)
        ]
        return self.put(name, results, uid)

    def put(self, name: str, results: Sequence[Mapping[str, Any]], uid: str = "", config: Any = ()) -> ClaimKey:
        uid = uid or f"uid-{name}"
        self.claims["default", name] = {
            "metadata": {"name": name, "namespace": "default", "uid": uid},
            "status": {
                "allocation": {"devices": {"results": list(results), "config": list(config)}},
                "reservedFor": [{"resource": "pods", "name": "p", "uid": "pod-uid"}],
            },
        }
        return ClaimKey(DRIVER, uid, name)

    async def get(self, namespace: str, name: str) -> Mapping[str, Any]:
        self.asked += 1
        if self.away:
            raise ApiError(self.away)
        if (found := self.claims.get((namespace, name))) is None:
            raise ApiError(f'resourceclaims "{name}" not found', 404)
        return copy.deepcopy(found)


class Owners:
    """The part of the daemon that owns claims and health."""

    def __init__(self, ledger: Ledger, inventory: Inventory) -> None:
        self.ledger, self.inventory = ledger, inventory
        self.released: list[Held] = []
        self.was_reset_of: list[str] = []

    async def allocated(self, given: Sequence[Held]) -> None:
        self.ledger.allocate(given, 0.0)
        self.inventory.claim(given)

    async def unprepared(self, ended: Sequence[Held]) -> None:
        self.inventory.unclaim(ended)
        self.released += ended

    def health_for_pod(self, hardware: str, *, reset: bool) -> Health:
        return HEALTHY

    def was_reset(self, hardware: Set[str]) -> None:
        self.was_reset_of += sorted(hardware)


class Stage:
    """One machine, whose kubelet and whose driver's process may come and go."""

    def __init__(self, root: Path, pre_start: PreStart = "none") -> None:
        self.root = root
        resources = [
            Resource(TOY, ResourceSpec(KIND, Options(), ({"is": ("toy",)},), pre_start=pre_start, serve="dra")),
            Resource(SHARED, ResourceSpec(KIND, Options(), replicas=3, serve="dra")),
        ]
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        self.host = Host.below(root)
        self.boot("boot-1")
        self.backend = Resetting(self.host, resources)
        self.inventory = Inventory(resources, {KIND: self.backend})
        self.api = Api()
        self.ledger = Ledger()
        self.owners = Owners(self.ledger, self.inventory)
        self.jobs = Jobs(HardwareQueue(), self._look)
        self.kubelet = Kubelet(root / "k", serves_dra=True, clock=Clock(FAST))
        self.problems, self.counts = Problems(), Counts()
        self.giving: set[tuple[str, str]] = set()
        self.serves = [TOY, SHARED]
        for key in "abc":
            self.found(toy(key, attributes={"is": ("toy",)}))
        self.found(toy("kvm"))
        self.inventory.ready(KIND)
        self.driver = self.another_process()

    def boot(self, boot: str) -> None:
        (self.root / "proc/sys/kernel/random/boot_id").write_text(boot)

    def found(self, device: Device) -> None:
        self.inventory.update(KIND, {device.unit: (device,)})

    def gone(self, key: str) -> None:
        self.inventory.update(KIND, {key: ()})

    async def _look(self, kind: str, units: Set[str]) -> None:
        pass

    def sick(self, key: str, why: str = "it does not answer") -> None:
        self.inventory.set_health({f"toy:{key}": Health(State.UNHEALTHY, "dead", why)})

    def another_process(self, name: str = DRIVER, *others: str) -> Driver:
        """One that serves this name; `others` are served beside it."""
        backends = {KIND: self.backend}
        allocator = Allocator(self.inventory, backends, self.jobs, self.owners.allocated)
        starter = Starter(self.inventory, self.ledger, backends, self.jobs, self.owners)
        cdi = Cdi(self.host, self.root / "state", self.inventory, backends)
        house = House(
            self.host, self.owners, self.ledger, self.inventory, backends, allocator, starter, cdi,
            self.kubelet.pod_resources_socket, self.counts, self.giving, frozenset(others),
        )  # fmt: skip
        config = DriverConfig(name, NODE, self.kubelet.root)
        return Driver(config, house, self.api.get, lambda: self.serves, self.problems, wall=lambda: 1000.0)

    @property
    def drivers(self) -> Drivers:
        return self.kubelet.drivers

    def lose_record(self, *uids: str) -> None:
        """Have the kubelet forget these claims, or all."""
        for uid in uids or list(self.drivers._claims):
            del self.drivers._claims[uid]

    @property
    def files(self) -> dict[str, Any]:
        """Name → content of what a container runtime reads."""
        return {path.name: json.loads(path.read_text()) for path in sorted((self.root / "run/cdi").glob("*.json"))}

    def nodes(self, pod: str) -> list[str]:
        """The device nodes that a pod's container gets."""
        return [node["path"] for edits in self.edits(pod) for node in edits.get("deviceNodes", ())]

    def environment(self, pod: str) -> dict[str, str]:
        return dict(it.split("=", 1) for edits in self.edits(pod) for it in edits.get("env", ()))

    def edits(self, pod: str) -> list[dict[str, Any]]:
        known = {
            f"{spec['kind']}={device['name']}": device["containerEdits"]
            for spec in self.files.values()
            for device in spec["devices"]
        }
        return [known[name] for name in self.drivers.cdi_devices(pod)]

    def held(self) -> dict[str, str]:
        """ID → the claim that has it."""
        return {it.id: it.claim.name for it in self.ledger.held() if it.claim is not None}

    async def admit(self, pod: str, *claims: ClaimKey) -> None:
        async with limit():
            await self.drivers.admit(pod, claims)

    async def end(self, pod: str, *claims: ClaimKey) -> None:
        async with limit():
            await self.drivers.end(pod, claims)

    @asynccontextmanager
    async def serving(self, driver: Driver | None = None) -> AsyncIterator[Driver]:
        """A process of the driver, another one if none is named, from its registration until the kubelet sees its end."""
        driver = driver or self.another_process()
        before = len(self.instances)
        async with running(driver.run):
            await until(lambda: driver.registered and len(self.instances) > before, "the driver is registered")
            yield driver
        await until(lambda: len(self.instances) == before, "the kubelet sees that the driver has gone")

    @property
    def instances(self) -> list[Instance]:
        """The processes that are registered."""
        return self.drivers.instances.get(DRIVER, [])

    def asked(self, call: str) -> list[list[str]]:
        return [ids for name, ids in self.backend.asked if name == call]


@asynccontextmanager
async def staged(root: Path, pre_start: PreStart = "none") -> AsyncIterator[Stage]:
    """A stage whose kubelet has registered its driver."""
    stage = Stage(root, pre_start)
    async with stage.kubelet, stage.serving(stage.driver):
        yield stage
    stage.jobs.close()


def only(found: Iterable[Any]) -> Any:
    (one,) = found
    return one
