"""What a backend did for a pod is undone once, and never under another pod; whatever fails, hangs or is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agent.daemon.state_file import StateFile
from agent.kubelet.api.v1beta1 import ContainerAllocateResponse
from agent.simulation.model import Phase, Pod
from tests.e2e.conftest import Trouble
from tests.e2e.node import Node, pod
from tests.e2e.pods.test_claims import OFTEN_ASKING
from tests.wait import until

TROUBLED = "fl.test/troubled0"
HASTY = OFTEN_ASKING + "from agent.hardware import reconciler\nreconciler.RETRY_FIRST = reconciler.RETRY_MOST = 0.02\n"

ASKED = """
import structlog
from agent.kubelet.allocation import Allocator
allocate = Allocator.allocate
def asked(*arguments):
    structlog.get_logger().info("asked-for-a-device")
    return allocate(*arguments)
Allocator.allocate = asked
"""


def nodes(node: Node, holder: Pod) -> list[str]:
    """The device nodes that the pod's container got."""
    uid = node.kubelet.pods[holder.key].uid
    (allocation,) = node.kubelet._running().manager.held.of(uid, "main").values()
    return [device.host_path for device in ContainerAllocateResponse().parse(allocation.reply).devices]


def releasing(node: Node) -> list[str]:
    """What an agent that starts now would undo."""
    return [held.id for held in StateFile(node.state).read().releasing or ()]


def made(node: Node, device_id: str) -> Path:
    """What a claim makes."""
    return node.dev / f"made-{device_id}"


async def test_a_node_that_its_claim_makes_is_handed_out_and_removed_after_the_pod(
    node: Node, trouble: Trouble
) -> None:
    node.mknod("t0/a")
    holder = pod(resource=TROUBLED)
    async with node.agent(trouble.resource(), prelude=HASTY, environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        assert (await node.admit(holder)).phase == Phase.RUNNING
        assert nodes(node, holder) == ["/dev/t0/a", "/dev/made-a"]
        node.kubelet.end(holder)
        agent.pass_minute()
        await until(lambda: not made(node, "a").exists(), "the made node's end")
        await until(lambda: releasing(node) == [], "the end of the release in the state file")
        assert not agent.said("release-failed")


async def test_a_release_that_fails_is_tried_again_and_said_once(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    holder = pod(resource=TROUBLED)
    trouble.order("undo", "raise")
    async with node.agent(trouble.resource(), prelude=HASTY, environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        await node.admit(holder)
        node.kubelet.end(holder)
        agent.pass_minute()
        await trouble.asked("undo", times=4)
        assert made(node, "a").exists()
        trouble.forget("undo")
        said = await agent.says("release-succeeded")
        assert said["slots"] == [f"{TROUBLED}/a"]
        assert not made(node, "a").exists()
        (failed,) = agent.said("release-failed")
        assert failed["reason"] == "undo was told to fail"


async def test_what_a_killed_agent_had_not_undone_is_undone_by_the_next(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "t0/b")
    ended, lasting = pod("ended", TROUBLED), pod("lasting", TROUBLED)
    trouble.order("undo", "raise")
    async with node.agent(trouble.resource(), prelude=HASTY, environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        await node.admit(ended)
        await node.admit(lasting)
        (gone,), (kept,) = node.held(ended, resource=TROUBLED), node.held(lasting, resource=TROUBLED)
        node.kubelet.end(ended)
        agent.pass_minute()
        await agent.says("release-failed", slots=[f"{TROUBLED}/{gone}"])
        await until(lambda: releasing(node) == [gone], "the release in the state file")
        await agent.kill()
    trouble.forget("undo")
    async with node.agent(trouble.resource(), environment=trouble.environment):
        await until(lambda: not made(node, gone).exists(), "the release by another agent")
        await until(lambda: releasing(node) == [], "the end of the release in the state file")
        assert made(node, kept).exists()


async def test_what_a_pod_holds_by_now_is_not_undone_by_the_next_agent(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    first, second = pod("first", TROUBLED), pod("second", TROUBLED)
    trouble.order("undo", "raise")
    async with node.agent(trouble.resource(), prelude=HASTY, environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        await node.admit(first)
        node.kubelet.end(first)
        agent.pass_minute()
        await agent.says("release-failed")
        assert (await node.admit(second)).phase == Phase.RUNNING
        await agent.kill()
    trouble.forget("undo")
    calls = trouble.calls().count("undo")
    async with node.agent(trouble.resource(), prelude=HASTY, environment=trouble.environment) as agent:
        await node.registered(TROUBLED)
        await until(lambda: releasing(node) == [], "the end of what was left to undo")
        await agent.takes_turns(50)
        assert (trouble.calls().count("undo"), made(node, "a").exists()) == (calls, True)


async def test_a_pod_waits_for_the_release_of_its_hardware(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    first, second = pod("first", TROUBLED), pod("second", TROUBLED)
    trouble.order("undo", "hang")
    prelude = HASTY + ASKED
    async with node.agent(trouble.resource(), prelude=prelude, environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        await node.admit(first)
        node.kubelet.end(first)
        agent.pass_minute()
        await trouble.asked("undo")
        trouble.forget("undo")
        admission = asyncio.create_task(node.admit(second))
        await agent.says("asked-for-a-device", times=2)
        await agent.takes_turns(20)
        assert not admission.done()
        assert trouble.calls().count("claim") == 1
        await trouble.release()
        assert (await admission).phase == Phase.RUNNING
        assert nodes(node, second) == ["/dev/t0/a", "/dev/made-a"]
        assert made(node, "a").exists(), "what is made for the second is not undone for the first"


async def test_a_claim_that_was_given_up_is_undone_when_it_is_over_and_its_pod_is_gone(
    node: Node, trouble: Trouble
) -> None:
    node.mknod("t0/a")
    trouble.order("claim", "hang")
    async with node.agent(trouble.resource(), prelude=HASTY, environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        refused = await agent.out_of_time(node.admit(pod(resource=TROUBLED)))
        assert refused.phase == Phase.FAILED
        agent.pass_minute()
        await agent.says("claims-ended")
        await trouble.asked("claim")
        await agent.takes_turns(20)
        assert "undo" not in trouble.calls(), "it is still being done"
        trouble.forget("claim")
        await trouble.release()
        await trouble.asked("undo")
        await until(lambda: not made(node, "a").exists(), "the end of what the late claim made")


async def test_claims_that_hang_do_not_blind_and_scans_that_hang_do_not_refuse(node: Node, trouble: Trouble) -> None:
    node.mknod(*(f"t0/{name}" for name in "abcdef"))
    async with node.agent(trouble.resource(), environment=trouble.environment) as agent:
        await node.healthy(*"abcdef", resource=TROUBLED)
        trouble.order("claim", "hang")
        for number in range(4):
            refused = await agent.out_of_time(node.admit(pod(f"stuck{number}", TROUBLED)))
            assert refused.phase == Phase.FAILED
        node.mknod("t0/g")
        await node.healthy(*"abcdefg", resource=TROUBLED)
        trouble.forget("claim")
        await trouble.release()
        for name in "xyz":
            trouble.order(f"discover-{name}", "hang")
            node.mknod(f"t0/{name}")
            await agent.out_of_time(agent.says("discovery-problem", subject=name))
        assert (await node.admit(pod("served", TROUBLED))).phase == Phase.RUNNING
