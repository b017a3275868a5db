"""No step of the loop is long, however many devices there are: at the start, a first look, a mass failure, a reload.

What is bounded is the byte-codes of one step, since they are the same on any machine at any load: `BOUND` of them take 15
to 30 ms, and what is done for each of the devices here in one step would take several times as many. The milliseconds with
10,000 devices are a figure of bench/ (`loop_step_max`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest

from agent.simulation.pods import Phase
from tests import loop_steps, nodes
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish
from tests.e2e.test_claims import OFTEN_ASKING

DEVICES: Final = 2000
HELD: Final = DEVICES // 2
BOUND: Final = 1_000_000


class Crowd:
    """A node with many devices, half of which pods hold, and the longest steps of its agents."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.steps = node.root / "steps"
        self._seen = 0
        self.pods = [pod(f"p{n}", count=HELD // 5) for n in range(5)]

    def come(self) -> None:
        for number in range(DEVICES):
            nodes.make_node(self.node.dev / f"w{number}", "c", 240, number)

    def go(self) -> None:
        self.node.unlink(*(f"w{number}" for number in range(DEVICES)))

    async def hold(self) -> None:
        for wanted in self.pods:
            assert (await self.node.admit(wanted)).phase == Phase.RUNNING

    async def lists(self, healthy: int, unhealthy: int = 0) -> None:
        """Wait for a list with so many devices."""

        def shown() -> bool:
            view = self.node.kubelet.resources[WIDGET]
            return (len(view.healthy), len(view.unhealthy)) == (healthy, unhealthy)

        await self.node.shows(lambda _: shown())

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[AgentProcess]:
        """An agent whose steps are watched."""
        watch = f"from tests import loop_steps\nloop_steps.report({str(self.steps)!r}, counted=True)\n"
        async with self.node.agent(prelude=OFTEN_ASKING + watch) as agent:
            yield agent

    def was_never_long(self) -> None:
        """None of the steps since this was asked last."""
        every = loop_steps.reported(self.steps)
        costly, self._seen = sorted(every[self._seen :], reverse=True), len(every)
        assert costly, "the watchdog sees nothing"
        assert costly[0].cost < BOUND, costly[:3]


@pytest.fixture
def crowd(node: Node) -> Crowd:
    crowd = Crowd(node)
    crowd.come()
    return crowd


async def test_no_step_of_the_loop_is_long_at_a_first_look_nor_at_a_start_with_claims(crowd: Crowd) -> None:
    async with crowd.agent() as agent:
        await crowd.lists(DEVICES)
        crowd.was_never_long()
        await crowd.hold()
        await agent.kill()
    crowd.was_never_long()
    async with crowd.agent() as agent:
        await crowd.lists(DEVICES)
        await agent.kill()
    crowd.was_never_long()
    crowd.node.lose_state()
    async with crowd.agent() as agent:
        await agent.says("claims-adopted", count=HELD)
        await crowd.lists(DEVICES)
    crowd.was_never_long()


async def test_no_step_of_the_loop_is_long_when_all_devices_go_come_back_or_are_let_go(crowd: Crowd) -> None:
    async with crowd.agent() as agent:
        await crowd.lists(DEVICES)
        await crowd.hold()
        crowd.was_never_long()
        crowd.go()
        await crowd.lists(0, HELD)
        crowd.was_never_long()
        crowd.come()
        await crowd.lists(DEVICES)
        crowd.was_never_long()
        for held in crowd.pods:
            crowd.node.kubelet.end(held)
        agent.pass_minute()
        await agent.says("claims-ended")
    crowd.was_never_long()


async def test_no_step_of_the_loop_is_long_at_a_reload_and_whoever_asks(crowd: Crowd) -> None:
    async with crowd.agent() as agent:
        await crowd.lists(DEVICES)
        await crowd.hold()
        crowd.was_never_long()
        config = crowd.node.config(chardev(count=2))
        await agent.says("config-reloaded")
        await crowd.lists(2 * DEVICES - HELD, 2 * HELD)
        crowd.was_never_long()
        for command in ("status", "doctor"):
            code, out, _ = await finish(command, "--json", "--config", str(config))
            assert json.loads(out), code
    crowd.was_never_long()
