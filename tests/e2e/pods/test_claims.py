"""What a pod holds never leaves a list, whatever happens to the agent, the device, the kubelet and the config."""

from __future__ import annotations

import asyncio

import pytest

from agent.daemon.state_file import StateFile
from agent.simulation.model import Change, Container, Kind, Phase, Pod
from tests.e2e.conftest import Trouble
from tests.e2e.node import UNHURRIED, WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess
from tests.wait import until

NEW = "fl.test/renamed"
TROUBLED = "fl.test/troubled0"

# --- kill -9 ---


@pytest.mark.parametrize("lost", [False, True], ids=["state kept", "state lost"])
async def test_a_killed_agent_remembers_what_is_held_and_gone(node: Node, lost: bool) -> None:
    node.mknod("w1", "w2", "w3")
    holder = pod(count=2)
    async with node.agent() as agent:
        await node.healthy("w1", "w2", "w3")
        assert (await node.admit(holder)).phase == Phase.RUNNING
        gone, _ = held = sorted(node.held(holder))
        await agent.kill()
    node.unlink(gone)
    if lost:
        node.lose_state()
    since = len(node.lists)
    async with node.agent():
        await node.shows(lambda k: gone in k.resources[WIDGET].unhealthy and len(k.resources[WIDGET].healthy) == 2)
        assert node.lists_without(gone, since) == []
        node.mknod(gone)
        await node.healthy("w1", "w2", "w3")
        assert not any(node.lists_without(device_id, since) for device_id in held)
    assert node.kubelet.panics == []


async def test_a_long_init_containers_device_is_kept_though_the_state_was_lost(node: Node) -> None:
    node.mknod("w1", "w2")
    holder = Pod("pod", (Container("main"),), init=(Container("init", {WIDGET: 1}, long=True),))
    async with node.agent() as agent:
        await node.healthy("w1", "w2")
        await node.admit(holder)
        (gone,) = node.held(holder, "init")
        await agent.kill()
    node.lose_state()
    node.unlink(gone)
    since = len(node.lists)
    async with node.agent():
        assert node.lists_without(gone, since) == []  # only the checkpoint knew (kubelet contract: A5)


async def test_held_ids_of_a_renamed_resource_are_served_though_the_kubelet_was_down(node: Node) -> None:
    node.mknod("w1", "w2", "w3")
    holder = pod(count=2)
    async with node.agent() as agent:
        await node.healthy("w1", "w2", "w3")
        await node.admit(holder)
        gone, kept = sorted(node.held(holder))
        await node.kubelet.stop()
        await agent.kill()
    node.unlink(gone)
    since = len(node.lists)
    async with AgentProcess(node.config(chardev(name=NEW)), UNHURRIED) as agent:
        await agent.says("ready")
        assert not agent.said("boot-waits")  # for devices that the kubelet would refuse anyway
        await node.kubelet.start()
        await node.registered(WIDGET, NEW)
        assert node.kubelet.resources[WIDGET].unhealthy == {gone, kept}
        assert node.kubelet.resources[WIDGET].healthy == set()
        (free,) = {"w1", "w2", "w3"} - {gone, kept}
        await node.healthy(free, resource=NEW)  # nobody is given what a pod holds under the old name
        assert not any(node.lists_without(device_id, since) for device_id in (gone, kept))
        refused = await node.admit(pod("late", WIDGET))
        assert refused.phase == Phase.FAILED
    assert node.kubelet.panics == []


async def test_a_pod_admitted_while_the_agent_dies_keeps_its_claim(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "t0/b")
    trouble.order("claim", "hang")
    async with node.agent(trouble.resource(), environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        admission = asyncio.create_task(node.admit(pod(resource=TROUBLED, count=2)))
        await trouble.asked("claim")
        await agent.kill()
    assert (await admission).phase == Phase.FAILED
    node.unlink("t0/a", "t0/b")
    since = len(node.lists)
    trouble.forget("claim")
    async with node.agent(trouble.resource(), environment=trouble.environment):
        await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {"a", "b"}, TROUBLED)
        assert node.lists_without("a", since, TROUBLED) == []


# --- an Allocate in flight ---


async def test_a_device_that_vanishes_during_its_allocate_stays_listed(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    trouble.order("claim", "hang")
    async with node.agent(trouble.resource(), environment=trouble.environment):
        await node.healthy("a", resource=TROUBLED)
        since = len(node.lists)
        admission = asyncio.create_task(node.admit(pod(resource=TROUBLED)))
        await trouble.asked("claim")
        node.unlink("t0/a")
        await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {"a"}, TROUBLED)
        await trouble.release()
        refused = await admission
        assert refused.phase == Phase.FAILED
        assert "Device a of fl.test/troubled0 cannot be used now: the device is gone" in refused.message
        node.mknod("t0/a")
        await node.healthy("a", resource=TROUBLED)
        assert node.lists_without("a", since, TROUBLED) == []
    assert node.kubelet.panics == []


async def test_a_device_that_flaps_during_its_allocate_is_given(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    trouble.order("claim", "hang")
    async with node.agent(trouble.resource(), environment=trouble.environment):
        await node.healthy("a", resource=TROUBLED)
        since = len(node.lists)
        admission = asyncio.create_task(node.admit(pod(resource=TROUBLED)))
        await trouble.asked("claim")
        for _ in range(3):
            node.unlink("t0/a")
            await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {"a"}, TROUBLED)
            node.mknod("t0/a")
            await node.healthy("a", resource=TROUBLED)
        await trouble.release()
        assert (await admission).phase == Phase.RUNNING
        assert node.lists_without("a", since, TROUBLED) == []
    assert node.kubelet.panics == []


STORMY = """
from agent.health import drains
from agent.kubelet import plugin
drains.FAILURES = 1_000_000
plugin.REMEMBERED = 3.0
"""
"""No device is left out because it flaps; and a kubelet may be a second late with reading a list, where a busy machine
lets this process wait."""


async def test_a_storm_of_flaps_beside_a_stream_of_pods_never_loses_a_held_id(node: Node) -> None:
    names = [f"w{n}" for n in range(8)]
    node.mknod(*names)
    missing: list[str] = []

    def flap(change: Change) -> None:
        """After each list every device goes and comes, but one stays away that is healthy in this list: another follows."""
        if change.kind is not Kind.LIST or change.after is None:
            return
        turned = names[len(node.lists) % len(names) :] + names[: len(node.lists) % len(names)]
        node.mknod(*missing)
        node.unlink(*names)
        missing[:] = [name for name in turned if name in change.after.healthy][:1]
        node.mknod(*(name for name in names if name not in missing))

    async with node.agent(prelude=STORMY):
        await node.healthy(*names)
        for n in range(4):
            assert (await node.admit(pod(f"early{n}"))).phase == Phase.RUNNING
        calm = node.kubelet.subscribe(flap)
        node.unlink("w0")
        missing.append("w0")
        phases = {(await node.admit(pod(f"late{n}"))).phase for n in range(6)}
        await node.lists_come(20)
        calm()
        assert phases <= {Phase.RUNNING, Phase.FAILED}
    assert node.kubelet.panics == []


# --- the end of a claim, which is judged 30 s after its Allocate ---

OFTEN_ASKING = """
from agent.claims import ledger
from agent.kubelet import pod_claims
ledger.REWRITE_AFTER = 0.1
pod_claims._AFTER_ALLOCATE, pod_claims._WHILE_ENDING, pod_claims.IDLE = 0.05, 0.05, 0.1
"""


def kept_claims(node: Node) -> list[str]:
    """What an agent that starts now would know."""
    return [held.id for held in StateFile(node.state).read().claims or ()]


async def test_a_tombstone_goes_when_its_pod_is_gone(node: Node) -> None:
    node.mknod("w1", "w2")
    holder = pod()
    async with node.agent(prelude=OFTEN_ASKING) as agent:
        await node.healthy("w1", "w2")
        await node.admit(holder)
        (gone,) = node.held(holder)
        node.unlink(gone)
        await node.shows(lambda k: k.resources[WIDGET].unhealthy == {gone})
        node.kubelet.end(holder)
        agent.pass_minute()
        await node.shows(lambda _: gone not in node.listed())
        await agent.says("claims-ended", slots=[f"{WIDGET}/{gone}"])
        await until(lambda: gone not in kept_claims(node), "the claim's end in the state file")
        await agent.kill()
    async with node.agent():  # and it does not come back with the next start
        assert gone not in node.listed()


async def test_a_retired_resource_goes_when_its_last_pod_is_gone(node: Node) -> None:
    node.mknod("w1")
    holder = pod()
    async with node.agent() as agent:
        await node.healthy("w1")
        await node.admit(holder)
        await agent.kill()
    async with AgentProcess(node.config(chardev(name=NEW)), OFTEN_ASKING) as agent:
        await node.registered(WIDGET, NEW)
        node.kubelet.end(holder)
        agent.pass_minute()
        await agent.says("resource-retired", resource=WIDGET)
        await node.healthy("w1", resource=NEW)
        await node.shows(lambda k: k.streams(WIDGET) == 0)


async def test_a_long_init_container_never_loses_its_claim(node: Node) -> None:
    node.mknod("w1", "w2")
    holder = Pod("pod", (Container("main"),), init=(Container("init", {WIDGET: 1}, long=True),))
    async with node.agent(prelude=OFTEN_ASKING) as agent:
        await node.healthy("w1", "w2")
        await node.admit(holder)
        (gone,) = node.held(holder, "init")
        since = len(node.lists)
        node.unlink(gone)
        await node.shows(lambda k: k.resources[WIDGET].unhealthy == {gone})
        agent.pass_minute()
        await node.lists_come(3)  # the agent doubted it, had the kubelet write its checkpoint, and read it, thrice
        assert node.lists_without(gone, since) == []
        assert not agent.said("claims-ended")
        await node.kubelet.finish_init(holder)
        node.kubelet.end(holder)
        await node.shows(lambda _: gone not in node.listed())
