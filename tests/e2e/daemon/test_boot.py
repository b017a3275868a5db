"""At a boot the service is ready, and systemd starts the kubelet, once the devices are there that pods had before."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.simulation.model import Phase
from tests.e2e.foreign import hold, other_plugin
from tests.e2e.node import UNHURRIED, WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish


@asynccontextmanager
async def booting(node: Node, **settings: str) -> AsyncIterator[AgentProcess]:
    """An agent on a node whose pod had w1 before the boot; there is no kubelet yet, and no w1."""
    node.mknod("w1", "w2")
    async with node.agent() as before:
        await node.healthy("w1", "w2")
        assert (await node.admit(pod(count=2))).phase == Phase.RUNNING
        await node.kubelet.stop(kill=True)
        await before.kill()
    node.unlink("w1")
    async with AgentProcess(node.config(chardev(), **settings), UNHURRIED) as agent:
        yield agent


async def test_the_service_is_ready_once_the_devices_that_pods_had_are_there(node: Node) -> None:
    async with booting(node) as agent:
        assert (await agent.says("boot-waits"))["slots"] == [f"{WIDGET}/w1"]
        await agent.takes_turns(5)
        assert not agent.said("ready")
        node.mknod("w1")
        await agent.says("ready")
        assert agent.said("boot-goes-on", level="info")
        await node.kubelet.start()
        await node.healthy("w1", "w2")


async def test_what_a_pod_has_under_an_earlier_plugins_id_is_there_for_the_kubelet_that_starts(node: Node) -> None:
    node.mknod("w1", "w2")
    async with other_plugin(node, WIDGET, "a-0", nodes=["/dev/w1"]):
        await hold(node, WIDGET)
    async with node.agent() as before:
        await node.healthy("a-0", "w2")
        await node.keeps('"a-0"')
        await node.kubelet.stop(kill=True)
        await before.kill()
    async with AgentProcess(node.config(chardev()), UNHURRIED) as agent:
        await agent.says("ready")
        assert not agent.said("boot-goes-on", level="warning")
        await node.kubelet.start()
        await node.healthy("a-0", "w2")


async def test_a_kubelet_that_starts_all_the_same_is_served_at_once(node: Node) -> None:
    async with booting(node) as agent:
        await agent.says("boot-waits")
        await node.kubelet.start()
        await agent.says("ready")
        await node.shows(lambda k: k.resources[WIDGET].unhealthy == {"w1"})


async def test_what_does_not_come_is_waited_for_as_long_as_is_configured_and_named(node: Node) -> None:
    async with booting(node, boot_wait="1ms") as agent:
        assert (await agent.says("boot-goes-on"))["slots"] == [f"{WIDGET}/w1"]
        await agent.says("ready")


@pytest.mark.parametrize("drained", [True, False])
async def test_nothing_is_waited_for_where_a_kubelet_runs_or_what_is_missing_is_drained(
    node: Node, *, drained: bool
) -> None:
    node.mknod("w1")
    async with node.agent() as before:
        await node.healthy("w1")
        assert (await node.admit(pod())).phase == Phase.RUNNING
        if drained:
            assert (await finish("drain", "w1", "--config", str(node.root / "config.toml")))[0] == 0
            await node.kubelet.stop(kill=True)
        await before.kill()
    if not drained:
        node.unlink("w1")
    async with AgentProcess(node.config(chardev()), UNHURRIED) as agent:
        await agent.says("ready")
        assert not agent.said("boot-waits")
