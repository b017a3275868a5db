"""An agent that did not run for a minute (SIGSTOP, a suspended machine) blames nobody for what nobody could do meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.e2e.conftest import Trouble
from tests.e2e.node import UNHURRIED, Node, pod
from tests.e2e.process import AgentProcess, Line

TROUBLED = "fl.test/troubled0"
PATIENT = """
from agent.devices import discovery
discovery.Discoverer.__init__.__kwdefaults__["unit_deadline"] = 50.0
"""
"""A busy machine does not get there; a minute is more."""


@asynccontextmanager
async def standing(node: Node, trouble: Trouble) -> AsyncIterator[AgentProcess]:
    async with AgentProcess(node.config(trouble.resource()), UNHURRIED + PATIENT, trouble.environment) as agent:
        await node.registered(TROUBLED)
        yield agent


def unwell(agent: AgentProcess) -> list[Line]:
    return agent.said("device-changed", state="Unhealthy") + agent.said("discovery-problem")


async def test_a_read_that_was_under_way_does_not_hang(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "t0/b")
    async with standing(node, trouble) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        trouble.order("discover-a", "hang")
        node.mknod("t0/c")
        await trouble.asked("discover-a", times=2)
        agent.pass_minute()
        node.mknod("t0/d")  # whatever is decided then is decided before this is seen
        await node.healthy("a", "b", "c", "d", resource=TROUBLED)
        node.mknod("t0/f")
        await node.healthy("a", "b", "c", "d", "f", resource=TROUBLED)
        trouble.forget("discover-a")
        await trouble.release()
        node.mknod("t0/e")
        await node.healthy("a", "b", "c", "d", "e", "f", resource=TROUBLED)
        assert not unwell(agent)


async def test_a_pod_whose_hardware_was_being_made_ready_is_not_refused(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    trouble.order("claim", "hang")
    async with standing(node, trouble) as agent:
        await node.healthy("a", resource=TROUBLED)
        admission = asyncio.create_task(node.admit(pod(resource=TROUBLED)))
        await trouble.asked("claim")
        agent.pass_minute()
        node.mknod("t0/b")
        await node.healthy("a", "b", resource=TROUBLED)
        trouble.forget("claim")
        await trouble.release()
        admitted = await admission
        assert admitted.phase == "Running", admitted.message


async def test_what_was_to_last_for_a_while_is_looked_at_before_it_counts(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    trouble.order("probe", 'odd [Signal("troubled:a", "slow", Verdict.DELAYED, "It is slow.", after=30.0)]')
    async with standing(node, trouble) as agent:
        await node.healthy("a", resource=TROUBLED)
        trouble.forget("probe")  # it recovers, which no event tells
        agent.pass_minute()
        assert (await agent.says("stood-still"))["waited"] > 20
        node.mknod("t0/b")
        await node.healthy("a", "b", resource=TROUBLED)
        assert not unwell(agent)
