"""An agent that did not run for a minute (SIGSTOP, a suspended machine) blames nobody for what nobody could do meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.e2e.conftest import Trouble
from tests.e2e.node import UNHURRIED, WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, Line, finish
from tests.wait import until

TROUBLED = "fl.test/troubled0"
PATIENT = """
from agent.discovery import discoverer
discoverer.Discoverer.__init__.__kwdefaults__["unit_deadline"] = 50.0
"""
"""A busy machine does not get there; a minute is more."""

SLOW_CHECKPOINT = """
from pathlib import Path
from agent.kubelet import witnesses
from agent.kubelet import pod_claims
witnesses._DEADLINE = pod_claims._LIST_WAITS = 50.0
read = witnesses.read_checkpoint
def slowly(directory):
    slow = Path({root!r}) / "slow"
    if slow.exists():
        (slow.parent / "reading").touch()
        slow.read_text()
    return read(directory)
witnesses.read_checkpoint = slowly
def must_be_waited_for(_):
    raise BlockingIOError
witnesses.read_at_once = must_be_waited_for
"""


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


async def test_a_process_that_was_stopped_and_goes_on_refuses_nobody_and_takes_nothing_for_ill(
    node: Node, trouble: Trouble
) -> None:
    """Really stopped; only its clock tells how long."""
    node.mknod("t0/a", "t0/b", "t0/c", "w1")
    slow = PATIENT + SLOW_CHECKPOINT.format(root=str(node.root))
    async with AgentProcess(node.config(trouble.resource(), chardev()), UNHURRIED + slow, trouble.environment) as agent:
        await node.registered(TROUBLED, WIDGET)
        await node.healthy("a", "b", "c", resource=TROUBLED)
        trouble.order("claim", "hang")
        claiming = asyncio.create_task(node.admit(pod("claiming", TROUBLED)))
        await trouble.asked("claim")
        trouble.order("discover-a", "hang")
        node.mknod("t0/d")
        await trouble.asked("discover-a", times=2)
        os.mkfifo(node.root / "slow")
        node.mknod("w2")  # its list waits for the checkpoint
        await until((node.root / "reading").exists, "a reading of the checkpoint")

        agent.signal(signal.SIGSTOP)
        await until(
            lambda: Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it stops"
        )
        agent.pass_minute()
        waiting = asyncio.create_task(node.admit(pod("waiting")))
        node.mknod("t0/e")
        agent.signal(signal.SIGCONT)
        assert (await finish("status", "--config", str(node.root / "config.toml")))[0] == 0  # it has taken turns since

        trouble.forget("claim")
        trouble.forget("discover-a")
        (node.root / "slow").rename(node.root / "read")
        await asyncio.to_thread((node.root / "read").write_text, "")
        await trouble.release()
        for admission in (claiming, waiting):
            admitted = await admission
            assert admitted.phase == "Running", admitted.message
        await node.healthy("a", "b", "c", "d", "e", resource=TROUBLED)
        await node.healthy("w1", "w2")
        assert not unwell(agent) + agent.said("witness-silent") + agent.said("not-alive")
    assert node.kubelet.panics == []


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


async def test_a_checkpoint_that_was_being_read_does_not_hang(node: Node) -> None:
    node.mknod("w1")
    slow = node.root / "slow"
    async with node.agent(prelude=SLOW_CHECKPOINT.format(root=str(node.root))) as agent:
        await node.healthy("w1")
        os.mkfifo(slow)
        node.mknod("w2")  # its list waits for the checkpoint
        await until((node.root / "reading").exists, "a reading of the checkpoint")
        agent.pass_minute()
        assert (await finish("status", "--config", str(node.root / "config.toml")))[0] == 0  # it has taken turns since
        slow.rename(node.root / "read")
        await asyncio.to_thread((node.root / "read").write_text, "")
        await node.healthy("w1", "w2")
        assert not agent.said("witness-silent")
