"""A second agent on a directory waits for the first, says so once, and takes over when it is gone."""

from __future__ import annotations

import asyncio
import signal

import pytest

from agent.simulation.model import Phase, Version
from tests.e2e.conftest import Trouble
from tests.e2e.node import UNHURRIED, WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess
from tests.wait import PATIENCE

TROUBLED = "fl.test/troubled0"


@pytest.fixture(params=["1.36", "1.37"])
def version(request: pytest.FixtureRequest) -> Version:
    version: Version = request.param
    return version


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
async def test_a_second_agent_waits_and_takes_over(node: Node, number: int) -> None:
    node.mknod("w1")
    async with node.agent() as first, AgentProcess(node.config(chardev())) as second:
        await node.healthy("w1")
        waiting = await second.says("another-agent-runs")
        assert waiting["pid"] == str(first.pid)
        registrations = node.kubelet.registrations[WIDGET]
        await second.takes_turns(5)
        assert node.kubelet.registrations[WIDGET] == registrations
        first.signal(number)
        await first.ended()
        await node.kubelet.wait_for(lambda k: k.registrations[WIDGET] > registrations, PATIENCE)
        await node.registered()
        await node.healthy("w1")
        assert node.kubelet.streams(WIDGET) == 1
        assert len(second.said("another-agent-runs")) == 1
        assert len(second.said("took-over")) == 1
        second.signal(signal.SIGTERM)
        assert await second.ended() == 0
    assert node.leftovers() == set()


async def test_what_was_given_while_it_waited_is_known_to_the_second(node: Node, trouble: Trouble) -> None:
    resource = trouble.resource()
    node.mknod("w1", "t0/a")
    trouble.order("claim", "hang")
    async with node.agent(chardev(), resource, environment=trouble.environment) as first:
        await node.healthy("w1")
        await node.healthy("a", resource=TROUBLED)
        config = node.config(chardev(), resource)
        async with AgentProcess(config, UNHURRIED, trouble.environment) as second:
            await second.says("another-agent-runs")
            assert (await node.admit(pod())).phase == Phase.RUNNING
            admission = asyncio.create_task(node.admit(pod("late", TROUBLED)))  # the kubelet will know nothing of it
            await trouble.asked("claim")
            node.unlink("w1", "t0/a")
            await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {"a"}, TROUBLED)
            since = len(node.lists)
            await first.kill()
            assert (await admission).phase == Phase.FAILED
            await second.says("took-over")
            await node.registered(WIDGET, TROUBLED)
            await node.shows(lambda k: k.resources[WIDGET].unhealthy == {"w1"})
            await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {"a"}, TROUBLED)
            assert node.lists_without("w1", since) == []
            assert node.lists_without("a", since, TROUBLED) == []
    assert node.kubelet.panics == []


async def test_agents_on_two_directories_do_not_wait_for_each_other(node: Node) -> None:
    async with node.agent(), AgentProcess(node.config(chardev(), plugin_dir=str(node.root / "other"))) as second:
        (node.root / "other").mkdir()
        await second.says("waiting-for-kubelet")
        assert not second.said("another-agent-runs")
