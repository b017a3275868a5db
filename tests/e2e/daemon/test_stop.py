"""A SIGTERM or SIGINT ends the agent, with exit code 0 and no socket left, whatever hangs for ever."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from agent.kubelet import registration
from tests.e2e.conftest import Trouble
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, Process
from tests.e2e.stalling import stalling_kubelet
from tests.wait import limit

LIMIT = 2.0  # seconds: what a SIGTERM may take, even with a backend that hangs
ENDLESS = """
from agent.discovery.discoverer import Discoverer
from agent.kubelet import kubelet_socket, registration
from agent.kubelet.allocation import Allocator
Allocator.__init__.__kwdefaults__["claim_deadline"] = 86400.0
Discoverer.__init__.__kwdefaults__["unit_deadline"] = 86400.0
kubelet_socket._REGISTER_DEADLINE = registration._STREAM_WITHIN = 86400.0
"""  # a stop that waits for what hangs never ends
SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)


async def assert_ends(agent: AgentProcess, number: int = signal.SIGTERM) -> None:
    agent.signal(number)
    assert await agent.ended() == 0


async def assert_ends_well(agent: AgentProcess, node: Node, number: int = signal.SIGTERM) -> None:
    await assert_ends(agent, number)
    assert node.leftovers() == set()
    assert agent.log[-1]["event"] == "stopped"
    assert not agent.said("no-json")


def test_all_that_a_stop_waits_for_ends_in_time() -> None:
    stream_and_calls = 2 * registration._STOP_PATIENCE
    assert registration._ALLOCATE_PATIENCE + stream_and_calls < LIMIT


@SIGNALS
async def test_a_signal_ends_an_idle_agent(node: Node, number: int) -> None:
    node.mknod("w1")
    async with node.agent() as agent:
        await node.healthy("w1")
        await assert_ends_well(agent, node, number)
    await node.healthy()
    assert node.kubelet.streams(WIDGET) == 0


@SIGNALS
@pytest.mark.parametrize("call", ["units", "discover"])
async def test_a_signal_ends_an_agent_whose_backend_hangs_in_its_scan(
    node: Node, trouble: Trouble, call: str, number: int
) -> None:
    node.mknod("t0/a")
    trouble.order(call, "hang")
    async with AgentProcess(node.config(trouble.resource()), ENDLESS, trouble.environment) as agent:
        await trouble.asked(call)
        await assert_ends_well(agent, node, number)


async def test_sigterm_ends_a_registered_agent_whose_backend_hangs(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    async with node.agent(trouble.resource(), prelude=ENDLESS, environment=trouble.environment) as agent:
        await node.healthy("a", resource="fl.test/troubled0")
        trouble.order("discover", "hang")
        node.mknod("t0/b")
        await trouble.asked("discover", times=2)
        await assert_ends_well(agent, node)


@SIGNALS
async def test_a_signal_ends_an_agent_whose_backend_hangs_in_a_pods_allocate(
    node: Node, trouble: Trouble, number: int
) -> None:
    resource = "fl.test/troubled0"
    node.mknod("t0/a")
    trouble.order("claim", "hang")
    async with node.agent(trouble.resource(), prelude=ENDLESS, environment=trouble.environment) as agent:
        await node.healthy("a", resource=resource)
        admission = asyncio.create_task(node.admit(pod(resource=resource)))
        await trouble.asked("claim")
        await assert_ends_well(agent, node, number)
        assert (await admission).phase == "Failed"
    assert node.kubelet.panics == []


@pytest.mark.parametrize("window", [0, 2**31 - 1], ids=["no window", "socket never read"])
async def test_sigterm_ends_an_agent_whose_kubelet_never_reads(bare_node: Node, window: int) -> None:
    bare_node.plugin_dir.mkdir()
    bare_node.mknod("w1")
    config = bare_node.config(chardev("/dev/w1", count=50_000))
    async with stalling_kubelet(bare_node.plugin_dir, window) as kubelet, AgentProcess(config, ENDLESS) as agent:
        async with limit("a registration"):
            await kubelet.registered.wait()
        await assert_ends_well(agent, bare_node)


async def test_sigterm_ends_an_agent_whose_kubelet_hangs(bare_node: Node) -> None:
    bare_node.mknod("w1")
    config = bare_node.config(chardev("/dev/w1", count=1000))
    simulation = "from agent.simulation.__main__ import main; main()"
    async with (
        Process("--root", str(bare_node.root), code=simulation) as kubelet,
        AgentProcess(config, ENDLESS) as agent,
    ):
        await agent.says("registered")
        kubelet.signal(signal.SIGSTOP)
        await assert_ends_well(agent, bare_node)


async def test_sigterm_ends_an_agent_that_waits_for_a_plugin_directory(bare_node: Node) -> None:
    async with AgentProcess(bare_node.config(chardev())) as agent:
        await agent.says("plugin-directory-unusable")
        await assert_ends_well(agent, bare_node)


async def test_sigterm_ends_an_agent_that_waits_for_another(node: Node) -> None:
    async with node.agent(), AgentProcess(node.config(chardev())) as second:
        await second.says("another-agent-runs")
        before = node.leftovers()
        await assert_ends(second)
        assert node.leftovers() == before
        assert node.kubelet.streams(WIDGET) == 1


async def test_what_lies_in_the_directory_and_is_not_the_agents_stays(node: Node, tmp_path: Path) -> None:
    async with node.agent() as agent:
        (node.sockets / "README").touch()
        await assert_ends(agent)
    assert node.leftovers() == {"README"}


async def test_a_hangup_ends_nothing_and_is_answered_in_the_log(node: Node) -> None:
    node.mknod("w1")
    async with node.agent() as agent:
        await node.healthy("w1")
        agent.signal(signal.SIGHUP)
        await agent.says("config-unchanged")
        assert node.kubelet.streams(WIDGET) == 1
