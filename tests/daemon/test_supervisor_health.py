"""Health in the daemon as a whole: what it remembers over restarts, what an operator decides, what a kubelet sees."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import msgspec
import pytest
from structlog.testing import capture_logs

from agent.config import Difference
from agent.daemon.reload import Change
from agent.daemon.state_file import StateFile
from agent.daemon.supervisor import Agent
from agent.discovery.reading import Changes
from agent.health.drains import FAILURES
from agent.kubelet import plugin
from agent.model import HEALTHY
from agent.runtime.errors import FairleadError
from agent.runtime.workers import Workers
from agent.simulation.model import Kind, Phase
from backends.base import (
    Backend,
    Clears,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Host,
    Record,
    Resource,
    ResourceSpec,
    Signal,
    Verdict,
    Watches,
)
from tests.daemon.node import Node, ended, hear, pod, put_in_force, serving_of
from tests.wait import settled, until

CARDS = "example.com/card"


class NoOptions(msgspec.Struct, frozen=True):
    pass


class Cards(Backend[NoOptions]):
    """Two cards with two replicas each; lines of the kernel's log tell of their failures."""

    options_type: ClassVar = NoOptions

    def __init__(self, binding: str = "first") -> None:
        super().__init__(Host(), [cards()])
        self.binding = binding
        self.said: tuple[Signal, ...] = ()
        self.there = ["card 0", "card 1"]

    def units(self) -> Iterable[str]:
        return list(self.there)

    def discover(self, unit: str) -> Discovery:
        name = f"pci:{unit[-1]}"
        return Discovery((Device(unit, unit, frozenset({name}), bindings={name: self.binding}),))

    def probe(self, device: Device) -> Iterable[Signal]:
        return [signal for signal in self.said if signal.hardware in device.hardware]

    def watches(self, known: object) -> Watches:
        return Watches(kernel_lines=frozenset({"XID"}))

    def signals(self, record: Record) -> Iterable[Signal]:
        ends = frozenset({Clears.REBIND, Clears.BOOT, Clears.OPERATOR})
        yield Signal("pci:0", "xid-79", Verdict.NOW, "XID 79: it has fallen off the bus", clears_on=ends)

    def edits(self, resource: Resource[NoOptions], grants: Sequence[Grant]) -> ContainerEdits:
        return ContainerEdits()


class MadeReady(Cards):
    """Remembers which cards have been made ready for pods."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: set[str] = set()

    def adopt(self, resource: Resource[NoOptions], device: Device) -> bool:
        self.ready.add(device.key)
        return False


def cards() -> Resource[Any]:
    return Resource(CARDS, ResourceSpec("cards", NoOptions(), replicas=2))


def xid(sequence: int = 1) -> Record:
    return Record("kmsg", "", sequence, 0.0, "XID 79")


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list goes out as soon as it is another."""
    monkeypatch.setattr(plugin, "COALESCE", 0.0)


@contextmanager
def lists(node: Node) -> Any:
    """The number of healthy IDs in each list that the kubelet gets meanwhile."""
    healthy: list[int] = []
    with node.kubelet.changes() as changes:
        yield healthy
        while not changes.empty():
            change = changes.get_nowait()
            if change.kind is Kind.LIST and change.after:
                healthy.append(len(change.after.healthy))


def kept(node: Node) -> dict[str, Any]:
    """What the state file says of health; nothing until it is written."""
    if not (node.state / "state.json").exists():
        return defaultdict(list)
    lines = [json.loads(line) for line in (node.state / "state.json").read_text().splitlines()]
    health: dict[str, Any] = next((line["health"] for line in reversed(lines) if "health" in line), defaultdict(list))
    return health


def reasons(lines: Iterable[MutableMapping[str, Any]]) -> list[str]:
    """Why devices changed, as the log tells."""
    return [line["reason"] for line in lines if line["event"] == "device-changed"]


async def test_all_slots_on_hardware_that_fails_change_in_one_message(node: Node) -> None:
    backend = Cards()
    async with node.running(cards(), backends={"cards": backend}) as agent:
        await node.has(CARDS, healthy=4)
        with lists(node) as healthy:
            backend.said = (Signal("pci:0", "sick", Verdict.NOW, "It is sick."),)
            agent.discoverers["cards"].rescan()
            await node.has(CARDS, healthy=2, unhealthy=2)
        assert healthy == [2]


async def test_a_drained_device_gets_no_pod_and_keeps_those_it_has_until_it_is_undrained(node: Node) -> None:
    async with node.running(cards(), backends={"cards": Cards()}) as agent:
        await node.has(CARDS, healthy=4)
        await node.kubelet.admit(pod("before", 4, CARDS))
        await agent.node.drain(await agent.node.find("card 0"), "replacing the fan")
        assert [drain["reason"] for drain in kept(node)["drains"]] == ["replacing the fan"]
        await node.has(CARDS, healthy=2, unhealthy=2)
        assert (await node.kubelet.admit(pod("after", 1, CARDS))).phase is Phase.FAILED
        assert await agent.node.undrain(await agent.node.find("card 0")) == ("drained",)
        await node.has(CARDS, healthy=4)
        assert kept(node)["drains"] == []


async def test_a_drain_ends_by_itself(node: Node) -> None:
    async with node.running(cards(), backends={"cards": Cards()}) as agent:
        await node.has(CARDS, healthy=4)
        with capture_logs() as lines:
            await agent.node.drain(["pci:0", "pci:1"], "", node.wall() + 7200)
            await node.has(CARDS, healthy=0, unhealthy=4)
            node.pass_time(3600)
            await settled()
            assert reasons(lines) == ["drained", "drained"]
            node.pass_time(3600)
            await until(lambda: reasons(lines) == ["drained", "drained", "", ""])
        await node.has(CARDS, healthy=4)
        await until(lambda: kept(node)["drains"] == [])


async def test_a_drain_that_has_ended_before_it_began_is_refused(node: Node) -> None:
    agent = node.agent(cards(), backends={"cards": Cards()})
    with pytest.raises(FairleadError, match="later than now"):
        await agent.node.drain(["pci:0"], "", node.wall() - 1.0)


async def test_what_was_drained_or_latched_is_never_healthy_after_a_restart(node: Node) -> None:
    async with node.running(cards(), backends={"cards": Cards()}) as agent:
        await node.has(CARDS, healthy=4)
        hear(agent, xid())
        await agent.node.drain(["pci:1"], "the fan")
        await node.has(CARDS, healthy=0, unhealthy=4)
    with lists(node) as healthy:
        async with node.running(cards(), backends={"cards": Cards()}) as agent:
            slots = agent.inventory.slots(CARDS)
            # the kubelet still has the list of the run before, all of it unhealthy since that ended
            await until(lambda: {slot.health.reason for slot in slots.values()} == {"xid-79", "drained"})
            await node.has(CARDS, healthy=0, unhealthy=4)
    assert set(healthy) == {0}


DOWN = Signal("pci:0", "port-down", Verdict.DELAYED, "port 1 is down", after=3600.0)


async def test_what_was_unhealthy_after_a_delay_is_so_from_the_first_list_of_a_restart_and_of_a_standby(
    node: Node,
) -> None:
    backend, beside = Cards(), Cards()
    backend.said = beside.said = (DOWN,)
    async with node.running(cards(), backends={"cards": backend}) as agent:
        await node.has(CARDS, healthy=4)
        node.pass_time(3600)
        await node.has(CARDS, healthy=2, unhealthy=2)
        since = agent.node.health.of("pci:0").since
        await until(lambda: len(kept(node)["sightings"]) == 1)
    with lists(node) as healthy:
        async with node.running(cards(), backends={"cards": backend}) as agent:
            await node.has(CARDS, healthy=2, unhealthy=2)
            assert agent.node.health.of("pci:0").since == pytest.approx(since, abs=1.0)
            standby = node.agent(cards(), backends={"cards": beside})
            running = asyncio.ensure_future(standby.run())
            await until(lambda: serving_of(standby).is_standing_by)
        await until(lambda: any(it.registered for it in serving_of(standby).registrars.values()))
        await node.kubelet.wait_for(lambda k: len(k.resources[CARDS].healthy) == 2)
        assert standby.node.health.of("pci:0").since == pytest.approx(since, abs=1.0)
    assert max(healthy) == 2
    beside.said = ()
    standby.discoverers["cards"].rescan()
    await node.kubelet.wait_for(lambda k: len(k.resources[CARDS].healthy) == 4)
    await until(lambda: kept(node)["sightings"] == [])
    await ended(running)


async def test_what_was_unhealthy_is_well_where_the_first_look_after_a_restart_says_so(node: Node) -> None:
    backend = Cards()
    backend.said = (DOWN,)
    async with node.running(cards(), backends={"cards": backend}):
        await node.has(CARDS, healthy=4)
        node.pass_time(3600)
        await node.has(CARDS, healthy=2, unhealthy=2)
        await until(lambda: len(kept(node)["sightings"]) == 1)
    backend.said = ()
    async with node.running(cards(), backends={"cards": backend}):
        await node.has(CARDS, healthy=4)


async def test_a_latch_ends_when_the_driver_is_bound_anew_even_while_we_are_down(node: Node) -> None:
    backend = Cards()
    async with node.running(cards(), backends={"cards": backend}) as agent:
        await node.has(CARDS, healthy=4)
        hear(agent, xid())
        await node.has(CARDS, healthy=2, unhealthy=2)
        backend.binding = "second"
        agent.discoverers["cards"].rescan()
        await node.has(CARDS, healthy=4)
        hear(agent, xid(2))
        await node.has(CARDS, healthy=2, unhealthy=2)
        await until(lambda: [latch["sequence"] for latch in kept(node)["latches"]] == [2])
    async with node.running(cards(), backends={"cards": Cards("third")}) as agent:
        await node.has(CARDS, healthy=4)
        assert agent._discovery.kmsg._after == ("", 2)
        await until(lambda: kept(node)["latches"] == [])


async def test_a_second_agent_takes_over_what_the_first_was_told_and_writes_nothing_before(node: Node) -> None:
    with capture_logs() as lines:
        async with node.running(cards(), backends={"cards": Cards()}) as first:
            await node.has(CARDS, healthy=4)
            second = node.agent(cards(), backends={"cards": Cards()})
            running = asyncio.ensure_future(second.run())
            await until(lambda: any(line["event"] == "another-agent-runs" for line in lines))
            hear(second, xid())
            await until(lambda: second.node.health.of("pci:0").reason == "xid-79")
            await settled()
            assert StateFile(node.state).read().health is None
            await first.node.drain(["pci:1"], "the fan")
        await node.has(CARDS, healthy=0, unhealthy=4)
        await until(lambda: len(kept(node)["latches"]) == len(kept(node)["drains"]) == 1)
        await ended(running)


async def test_flapping_hardware_is_logged_once_and_left_alone(node: Node) -> None:
    backend = Cards()
    async with node.running(cards(), backends={"cards": backend}) as agent:
        await node.has(CARDS, healthy=4)
        with capture_logs() as lines:
            for n in range(30):
                backend.said = () if n % 2 else (Signal("pci:0", "sick", Verdict.NOW, "It is sick."),)
                agent.discoverers["cards"].rescan()
                await until(
                    lambda: (agent.node.health.for_pod("pci:0", node.clock()).reason == "") == (not backend.said)
                )
            await settled()
        await node.has(CARDS, healthy=2, unhealthy=2)
        assert reasons(lines) == ["sick", "", "sick", "", "sick", "", "sick", "", "flapping"]
        await until(lambda: len(kept(node)["quarantines"]) == 1)


async def come_and_go(node: Node, agent: Agent, backend: Cards, times: int) -> None:
    """The second card is pulled out and put in again, and the kubelet hears of each."""
    for _ in range(times):
        for there in (["card 0"], ["card 0", "card 1"]):
            backend.there = there
            agent.discoverers["cards"].rescan()
            await until(lambda: len(agent.inventory.devices("cards")) == len(backend.there))
            health = [slot.health.offered for slot in agent.inventory.slots(CARDS).values()]
            await node.has(CARDS, healthy=health.count(True), unhealthy=health.count(False))


async def test_a_card_that_comes_and_goes_is_left_out_until_an_operator_says_that_it_is_well(node: Node) -> None:
    backend = Cards()
    async with node.running(cards(), backends={"cards": backend}) as agent:
        await node.has(CARDS, healthy=4)
        await come_and_go(node, agent, backend, FAILURES - 1)
        await node.has(CARDS, healthy=4)
        with lists(node) as healthy:
            await come_and_go(node, agent, backend, 1)
            await node.has(CARDS, healthy=2, unhealthy=2)
        assert set(healthy) == {2}, "it comes back Unhealthy, not a moment later"
        assert (await node.kubelet.admit(pod("after", 3, CARDS))).phase is Phase.FAILED
    async with node.running(cards(), backends={"cards": Cards()}) as agent:
        await node.has(CARDS, healthy=2, unhealthy=2)
        assert await agent.node.undrain(await agent.node.find("card 1")) == ("flapping",)
        await node.has(CARDS, healthy=4)


async def test_a_card_that_comes_and_goes_because_of_what_we_do_is_well(node: Node) -> None:
    backend, workers = Cards(), Workers("test")
    async with node.running(cards(), backends={"cards": backend}) as agent:
        await node.has(CARDS, healthy=4)
        agent._jobs.turns._clock = lambda: 0.0  # however long it takes here
        async with agent._jobs.turns.take({"pci:0"}) as turn:  # whose reset takes its neighbour along
            await turn.run(workers, lambda: None)
            await come_and_go(node, agent, backend, 2 * FAILURES)
        await come_and_go(node, agent, backend, 1)
        await node.has(CARDS, healthy=4)
    workers.close()


async def test_a_card_that_comes_and_goes_because_of_reloads_is_well(node: Node) -> None:
    async with node.running(cards(), backends={"cards": Cards()}) as agent:
        await node.has(CARDS, healthy=4)
        for n in range(4 * FAILURES):
            fresh = Cards()
            fresh.there = fresh.there[: 1 + n % 2]
            difference = Difference(node.config(cards()), changed=(CARDS,), kinds=frozenset({"cards"}))
            await put_in_force(agent, Change(difference, {"cards": fresh}))
            await node.has(CARDS, healthy=2 * len(fresh.there))
        gone = Difference(node.config(), removed=(CARDS,), kinds=frozenset({"cards"}))
        for _ in range(2 * FAILURES):
            await put_in_force(agent, Change(gone, {}))
            await put_in_force(agent, Change(difference, {"cards": Cards()}))
            await until(lambda: [it.health.offered for it in agent.inventory.slots(CARDS).values()] == [True] * 4)
            await node.has(CARDS, healthy=4)


async def test_the_devices_of_a_resource_that_a_reload_changes_are_made_ready(node: Node) -> None:
    async with node.running(cards(), backends={"cards": Cards()}) as agent:
        await node.has(CARDS, healthy=4)
        difference, fresh = Difference(node.config(cards()), changed=(CARDS,), kinds=frozenset({"cards"})), MadeReady()
        await put_in_force(agent, Change(difference, {"cards": fresh}))
        await until(lambda: fresh.ready == {"card 0", "card 1"})


async def test_what_moves_between_units_of_one_look_has_not_been_away(node: Node) -> None:
    async with node.running(cards(), backends={"cards": Cards()}) as agent:
        await node.has(CARDS, healthy=4)
        here, there = "card 0", "card 9"
        for _ in range(FAILURES + 1):
            card = Device("card 0", there, frozenset({"pci:0"}))
            agent.node.scanned(Changes("cards", {here: ()}, {here: ()}, more=True))
            agent.node.scanned(Changes("cards", {there: (card,)}, {there: ()}))
            here, there = there, here
        assert agent.node.health.of("pci:0") is HEALTHY
