"""Everything at once: hardware, pods, the kubelet, the configuration and a person go on without a pause, and beside each
other. Whatever came before what, it ends well: the kubelet is told what is there, what pods hold is claimed, what they held
is released, and nothing was done to hardware that somebody had.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

import pytest
from structlog.testing import capture_logs

from agent.claims import ledger
from agent.config import compare
from agent.daemon.reload import Change
from agent.daemon.supervisor import Agent
from agent.hardware import reconciler
from agent.kubelet import kubelet_socket, plugin, pod_claims, registration
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Phase
from agent.simulation.plugin_client import PluginClient
from agent.simulation.pod_workers import KubeletStoppedError
from backends.base import (
    AllocationRefused,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Host,
    Released,
    Resource,
    ResourceSpec,
    Signal,
    Verdict,
)
from tests.daemon.conftest import node_alone
from tests.daemon.node import NEVER, Node, pod, put_in_force, serving_of
from tests.fakes import FakeOptions
from tests.wait import limit, until

__all__ = ["node_alone"]  # a fixture


@pytest.fixture
def node(node_alone: Node) -> Node:
    """Its kubelet is started by the test."""
    return node_alone


KIND: Final = "cards"
PLACES: Final = "12345"
STEPS: Final = 250
TICK: Final = 61.0
"""Seconds; after one, a claim is old enough to end, and hardware that has flapped for the first time is tried again."""
OURS_TO_FEAR: Final = {"part-failed", "part-restarts", "backend-failed", "placement-failed"}


def takes(name: str, places: str, replicas: int = 1) -> Resource[FakeOptions]:
    select = ({"place": tuple(places)},)
    return Resource(name, ResourceSpec(KIND, FakeOptions(), select=select, replicas=replicas))


A, B = takes("x/a", "123"), takes("x/b", PLACES)
CONFIGURATIONS: Final = ((A, B), (B, A), (takes("x/a", "12"), takes("x/c", PLACES)), (A,))


class World:
    """The cards that are there, and what is done to them; how long anything takes is counted in steps of the chaos."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.cards = {place: number for number, place in enumerate(PLACES)}
        self.sick: set[str] = set()
        self.claimed: set[str] = set()
        self.wrongs: list[str] = []
        self.bad_luck = 0.2
        self.in_use: Callable[[], set[str]] = set
        self.now = 0.0
        """Seconds, for the agent: they pass only while no pod is being admitted, so that each claim's pod is known."""
        self.steps = 0
        self.is_calm = False
        self._acting: set[str] = set()
        self._stepped = threading.Condition()

    def step(self) -> None:
        """The chaos goes on: what takes a step less than it did ends."""
        with self._stepped:
            self.steps += 1
            self._stepped.notify_all()

    def calm(self) -> None:
        """From now on, nothing takes longer than it must, and nothing fails."""
        with self._stepped:
            self.is_calm, self.bad_luck = True, 0.0
            self._stepped.notify_all()

    def has_come(self, step: int) -> bool:
        return self.is_calm or self.steps >= step

    def act(self, what: str, hardware: Iterable[str]) -> None:
        """Do something to this hardware, which takes some steps and may fail."""
        names, end = set(hardware), self.steps + self.dice.choice([0, 1, 5])
        with self._stepped:
            if beside := names & self._acting:
                self.wrongs.append(f"{what} of {beside} beside something else")
            self._acting |= names
            self._stepped.wait_for(lambda: self.has_come(end))
            self._acting -= names
        if self.dice.random() < self.bad_luck:
            raise OSError("bad luck")


class Cards(Backend[FakeOptions]):
    """Has to make every card ready for its pod, and to undo that."""

    options_type: ClassVar = FakeOptions

    def __init__(self, world: World, resources: Sequence[Resource[Any]]) -> None:
        super().__init__(Host(), resources)
        self.world = world

    def units(self) -> Iterable[str]:
        return list(self.world.cards)

    def discover(self, unit: str) -> Discovery:
        if (serial := self.world.cards.get(unit)) is None:
            return Discovery()
        names = {"place": (unit,)}
        return Discovery((Device(unit, unit, frozenset({f"c:{unit}"}), identity=str(serial), attributes=names),))

    def probe(self, device: Device) -> Iterable[Signal]:
        if device.unit in self.world.sick:
            yield Signal(f"c:{device.unit}", "sick", Verdict.NOW, "It is sick.")

    def edits(self, resource: Resource[FakeOptions], grants: Sequence[Grant]) -> ContainerEdits:
        return ContainerEdits()

    def needs_claim(self, resource: Resource[FakeOptions]) -> bool:
        return True

    def claim(self, resource: Resource[FakeOptions], grants: Sequence[Grant]) -> None:
        hardware = {name for grant in grants for name in grant.device.hardware}
        self.world.claimed |= hardware
        try:
            self.world.act("claim", hardware)
        except OSError as error:
            raise AllocationRefused(f"It has {error}.") from None

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:
        if taken := idle & self.world.in_use():
            self.world.wrongs.append(f"release of {taken}, which a pod has")
        self.world.act("release", {name for it in ended for name in it.hardware})
        self.world.claimed -= idle


class Chaos:
    """What happens, one thing after the other, none of which waits for what it sets off."""

    def __init__(self, node: Node, agent: Agent, world: World) -> None:
        self.node, self.agent, self.world, self.dice = node, agent, world, world.dice
        self.kubelet: Kubelet = node.kubelet
        self.configuration: Sequence[Resource[Any]] = CONFIGURATIONS[0]
        self.refusals: list[str] = []
        self.frozen = 0  # steps, at most, that the kubelet's disk may take
        self._pods = 0
        self._under_way: set[asyncio.Future[None]] = set()
        self._given: dict[str, set[str]] = {}  # pod → hardware
        world.in_use = self._in_use

    def _in_use(self) -> set[str]:
        running = [key[1] for key, status in list(self.kubelet.pods.items()) if status.phase is Phase.RUNNING]
        return {hardware for name in running for hardware in self._given.get(name, ())}

    def look(self) -> None:
        for discoverer in self.agent.discoverers.values():
            discoverer.rescan()

    async def happen(self) -> None:
        """Let one thing happen, and what it sets off go on for a while."""
        self.world.step()
        if not self._under_way:
            self.world.now += TICK
        does: dict[Callable[[], Any], float] = {
            self.a_pod_comes: 12,
            self.a_pod_ends: 8,
            self.a_card_comes_goes_or_is_exchanged: 6,
            self.a_card_falls_ill_or_recovers: 5,
            self.the_kubelet_restarts: 3,
            self.the_configuration_changes: 3,
            self.an_operator_drains: 2,
            self.a_connection_breaks: 1,
            self.the_disk_stands_still: 2,
        }
        done = self.dice.choices(list(does), list(does.values()))[0]()
        if done is not None:
            await done
        for _ in range(self.dice.choice([1, 1, 5, 50, 500])):  # not until all is quiet: on a busy machine it never is
            await asyncio.sleep(0)

    def a_pod_comes(self) -> None:
        if names := sorted(self.kubelet.resources):
            self._pods += 1
            admission = self._admit(f"pod-{self._pods}", self.dice.choice(names), self.dice.choice([1, 1, 2]))
            self._under_way.add(task := asyncio.ensure_future(admission))
            task.add_done_callback(self._under_way.discard)

    async def _admit(self, name: str, resource: str, count: int) -> None:
        with suppress(KubeletStoppedError):
            status = await self.kubelet.admit(pod := _pod(name, count, resource))
            if status.phase is Phase.FAILED:
                self.refusals.append(status.message)
            else:
                with suppress(KubeletStoppedError):
                    held = self.kubelet.held(pod, "app").items()
                    slots = [(of, device_id) for of, ids in held for device_id in ids]
                    self._given[name] = {
                        h for it in self.agent.node.ledger.held() if it.slot in slots for h in it.hardware
                    }

    def a_pod_ends(self) -> None:
        if running := [it.pod for it in self.kubelet.pods.values() if it.phase is Phase.RUNNING]:
            self.kubelet.end(self.dice.choice(running))

    def a_card_comes_goes_or_is_exchanged(self) -> None:
        place, cards = self.dice.choice(PLACES), self.world.cards
        if place in cards and self.dice.random() < 0.5:
            del cards[place]
        else:
            cards[place] = max(cards.values(), default=0) + 1
        self.look()

    def a_card_falls_ill_or_recovers(self) -> None:
        self.world.sick ^= {self.dice.choice(PLACES)}
        self.look()

    async def the_kubelet_restarts(self) -> None:
        await self.kubelet.restart(self.dice.choice(["1.32", "1.36"]), kill=self.dice.random() < 0.5)

    async def the_configuration_changes(self) -> None:
        self.configuration = self.dice.choice(CONFIGURATIONS)
        difference = compare(self.agent.config, self.node.config(*self.configuration))
        made = {KIND: Cards(self.world, self.configuration)} if difference.kinds else {}
        await put_in_force(self.agent, Change(difference, made))

    async def an_operator_drains(self) -> None:
        hardware = [f"c:{self.dice.choice(PLACES)}"]
        await (
            self.agent.node.drain(hardware, "why not")
            if self.dice.random() < 0.5
            else self.agent.node.undrain(hardware)
        )

    def a_connection_breaks(self) -> None:
        if registrars := list(serving_of(self.agent).registrars.values()):
            self.dice.choice(registrars)._server.reset_connections()

    def the_disk_stands_still(self) -> None:
        self.frozen = self.dice.choice([0, 0, 30])

    # --- and when all is quiet ---

    async def calm(self) -> None:
        self.world.calm()
        self.world.sick.clear()
        await self.agent.node.undrain([f"c:{place}" for place in PLACES])
        self.look()
        async with limit("all pods are admitted or refused", lambda: self._under_way):
            while self._under_way:
                await asyncio.wait(set(self._under_way))

    async def end_well(self) -> None:
        """All is well by itself, but for one thing: here no pod's processes are to be seen, so a person says that none is left."""
        ledger = self.agent.node.ledger
        while True:
            await until(lambda: self.is_well() or ledger.forgotten(), "all is well", lambda: list(self.wrongs()))
            if not (forgotten := ledger.forgotten()):
                return
            self.agent.node.believe({name for it in ledger.held() if it.slot in forgotten for name in it.hardware})

    def is_well(self) -> bool:
        """Whether nothing is wrong any more. If something is, time passes."""
        self.world.now += TICK
        return not list(self.wrongs())

    def wrongs(self) -> Iterator[str]:
        """What is not as it has to be in the end."""
        for resource in self.configuration:
            name, slots = resource.name, self.agent.inventory.slots(resource.name)
            healthy = frozenset(device_id for device_id, slot in slots.items() if slot.health.offered)
            view = self.kubelet.resources.get(name)
            if view is None or (view.healthy, view.unhealthy) != (healthy, frozenset(slots) - healthy):
                yield f"the kubelet has {view}, and there is {sorted(slots)}, of which are healthy {sorted(healthy)}"
            if self.kubelet.streams(name) != 1:
                yield f"{name} has {self.kubelet.streams(name)} streams"
        held = {(of, device_id) for it in self._running() for of, ids in it.items() for device_id in ids}
        if held != (known := {it.slot for it in self.agent.node.ledger.held()}):
            yield f"pods have {sorted(held)}, and claimed is {sorted(known)}"
        if left := self.world.claimed - {h for it in self.agent.node.ledger.held() for h in it.hardware}:
            yield f"nobody has {sorted(left)} any more, and it was not released"
        if self.agent.node.releaser.pending() or self.agent._jobs.turns.busy:
            yield "something is still to be undone"

    def _running(self) -> list[dict[str, frozenset[str]]]:
        return [self.kubelet.held(it.pod, "app") for it in self.kubelet.pods.values() if it.phase is Phase.RUNNING]


_pod = pod


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done again after seconds and minutes is done again at once."""
    for module, name, seconds in (
        (ledger, "REWRITE_AFTER", 0.0), (reconciler, "RETRY_FIRST", 0.01),
        (pod_claims, "_AFTER_ALLOCATE", 0.005), (pod_claims, "_WHILE_ENDING", 0.01), (pod_claims, "IDLE", 0.03),
        (plugin, "REMEMBERED", 0.05), (plugin, "COALESCE", 0.01), (kubelet_socket, "_REGISTER_DEADLINE", 0.05),
        (registration, "_REFUSED_DELAY", 0.1), (registration, "_CLOSED_WITHIN", 0.05),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_at_once_it_ends_well(node: Node, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world, dial = World(seed), PluginClient.dial
    node.kubelet.version = world.dice.choice(["1.32", "1.36", "1.37"])

    async def late(self: PluginClient) -> None:
        end = world.steps + world.dice.randrange(chaos.frozen + 1)
        await until(lambda: world.has_come(end))
        await dial(self)

    monkeypatch.setattr(PluginClient, "dial", late)
    monkeypatch.setattr(node, "clock", lambda: world.now)
    await node.kubelet.start()
    with capture_logs() as lines:
        backends = {KIND: Cards(world, CONFIGURATIONS[0])}
        async with node.running(*CONFIGURATIONS[0], backends=backends) as agent:
            chaos = Chaos(node, agent, world)
            await until(lambda: "x/a" in node.kubelet.resources)
            for _ in range(STEPS):
                await chaos.happen()
            monkeypatch.setattr(kubelet_socket, "_REGISTER_DEADLINE", NEVER)  # however busy the machine is
            await chaos.calm()
            await chaos.end_well()
    assert world.wrongs == []
    assert [line for line in lines if line["event"] in OURS_TO_FEAR] == []
    assert not [why for why in chaos.refusals if "code = Unknown" in why or "code = Internal" in why]
