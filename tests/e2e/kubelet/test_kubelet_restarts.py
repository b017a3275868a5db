"""Kubelets that come and go: every resource is registered again, with one stream, and nothing piles up."""

from __future__ import annotations

import random
import signal

import pytest

from agent.simulation.sockets import Version
from tests.e2e.node import WIDGET, Node, chardev
from tests.e2e.process import AgentProcess
from tests.wait import limit, until

RESTARTS = 200  # issue: "200 kubelet restarts in a row (simulated, both wipe styles)"
WARM_UP = 150  # restarts after which the agent has all that it keeps: a thousand lines of its log, for one
NAMES = [f"fl.test/r{n}" for n in range(8)]
SPARE = 2  # threads or files; what piles up would be many more

COUNTED = """
import gc, signal, sys
import structlog

def count(*_):
    gc.collect()
    structlog.get_logger().info("counted", blocks=sys.getallocatedblocks())

signal.signal(signal.SIGUSR2, count)
"""
"""SIGUSR2 makes it say how much it keeps. Its resident memory also has what waits for the collector, and its allocator's
gaps: on a busy machine more of both."""

UNTOLD = "from agent.kubelet import kubelet_socket\nkubelet_socket._WORTH_SAYING = 60.0\n"
"""A kubelet's restart may take longer on a busy machine, which the agent would mention."""


@pytest.fixture(params=["1.36", "1.37"])
def version(request: pytest.FixtureRequest) -> Version:
    version: Version = request.param
    return version


async def restart(node: Node, rng: random.Random) -> None:
    """One restart of a random kind; now and then the next comes before everything is registered again."""
    styles: tuple[Version, ...] = ("1.32", "1.36")
    await node.kubelet.restart(rng.choice(styles), kill=rng.random() < 0.5)
    if rng.random() < 0.8:
        await node.registered(*NAMES)


async def blocks(agent: AgentProcess) -> int:
    """How many pieces of memory it keeps, without what is only not collected yet."""
    times = len(agent.said("counted")) + 1
    agent.signal(signal.SIGUSR2)
    return int(str((await agent.says("counted", times=times))["blocks"]))


@pytest.mark.timeout(480)  # 5 s, many times that on a busy machine, and a wait for what never comes
async def test_200_kubelet_restarts_end_with_one_stream_each(node: Node) -> None:
    rng = random.Random(1)
    node.mknod(*(f"r{n}" for n in range(8)))
    async with node.agent(*(chardev(f"/dev/r{n}", NAMES[n]) for n in range(8)), prelude=UNTOLD + COUNTED) as agent:
        for _ in range(WARM_UP):
            await restart(node, rng)
        await node.registered(*NAMES)
        files, threads, kept = agent.open_files(), agent.threads(), await blocks(agent)
        for _ in range(RESTARTS - WARM_UP):
            await restart(node, rng)
        await node.registered(*NAMES)
        for n, name in enumerate(NAMES):
            await node.healthy(f"r{n}0", resource=name)
            assert node.kubelet.streams(name) == 1
        assert node.served() == {f"fl.test_r{n}.sock" for n in range(8)}
        # the last registrations' connections may be open yet, or a question to podresources under way
        await until(lambda: agent.open_files() <= files + SPARE, "as many files as before")
        await until(lambda: agent.threads() <= threads + SPARE, "as many threads as before")
        async with limit("less than one piece for each registration", lambda: agent.said("counted")):
            while await blocks(agent) - kept >= (RESTARTS - WARM_UP) * len(NAMES):
                pass  # what belongs to a connection that is just being closed goes
        assert not [line for line in agent.log if line["level"] in ("warning", "error")]


async def test_the_agent_registers_with_a_kubelet_that_comes_late(bare_node: Node) -> None:
    bare_node.plugin_dir.mkdir()
    bare_node.mknod("w1")
    async with AgentProcess(bare_node.config(chardev())) as agent:
        await agent.says("waiting-for-kubelet")
        async with bare_node.kubelet:
            await bare_node.registered(WIDGET)
            await bare_node.healthy("w1")
            await agent.says("registered")
            said = [line["event"] for line in agent.log if "kubelet" in line["event"]]
    assert said == ["waiting-for-kubelet", "kubelet-found"]


async def test_the_agent_waits_for_no_kubelet_that_is_there(node: Node) -> None:
    async with node.agent(prelude=UNTOLD) as agent:
        await node.kubelet.restart()
        await agent.says("kubelet-restarted")
    assert agent.log[0]["event"] == "starting"
    assert agent.log[0]["file"] == str(node.root / "config.toml")
    assert [line["event"] for line in agent.log if "kubelet" in line["event"]] == ["kubelet-found", "kubelet-restarted"]


async def test_what_changes_while_the_kubelet_is_down_is_in_its_first_list(node: Node) -> None:
    node.mknod("w1", "w2")
    async with node.agent() as agent:
        await node.healthy("w1", "w2")
        await node.kubelet.stop()
        node.unlink("w1")
        node.mknod("w3")
        await agent.says("device-changed", device="/dev/w1", state="Gone")
        await agent.says("device-changed", device="/dev/w3", state="Healthy")
        since = len(node.lists)
        await node.kubelet.start()
        await node.registered()
        after = node.lists[since].after
        assert after is not None
        assert after.healthy == {"w2", "w3"}
