"""From the kernel's word to the kubelet's list: real devices, injected events, bursts, and events that were lost."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.kubelet.plugin import COALESCE, CREDIT
from agent.simulation.demo_stage import LoopDevice
from tests.e2e.inject import Inject, injector
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess
from tests.needs import skip_without
from tests.wait import until

BURST = 10_000  # events

DEAF = """
from agent.discovery import paths
paths.PathSource._on_change = paths.PathSource._on_overflow = lambda *_: None
"""  # to inotify
LENIENT = """
from agent.health import drains
drains.FAILURES = 1000
"""  # where a node is often removed between a look at it and its probe, which counts as a failure
ALONE = """
from tests.e2e import hermetic
hermetic.isolate()
"""  # no uevents but the injected ones


# --- real devices ---


@pytest.fixture
async def loop_device() -> AsyncIterator[LoopDevice]:
    """One that does not exist yet, and will not when the test is over."""
    skip_without("loop devices")
    device = LoopDevice(random.SystemRandom().randrange(10_000, 1 << 20))
    try:
        yield device
    finally:
        await asyncio.to_thread(device.remove)


@pytest.mark.parametrize(
    ("uevents", "prelude"),
    [("kernel", ""), ("kernel", DEAF), ("off", "")],
    ids=["both", "uevents alone", "inotify alone"],
)
async def test_a_real_loop_device_comes_and_goes(
    node: Node, loop_device: LoopDevice, uevents: str, prelude: str
) -> None:
    resource = chardev(f"/dev/loop{loop_device.number // 10}?")
    async with node.agent(resource, uevents=uevents, prelude=prelude, dev="/dev") as agent:
        for _ in range(3):
            await asyncio.to_thread(loop_device.add)
            await node.shows(lambda k: loop_device.name in k.resources[WIDGET].healthy)
            await asyncio.to_thread(loop_device.remove)
            await node.shows(lambda _: loop_device.name not in node.listed())
        assert not agent.said("resync")
    assert node.kubelet.panics == []


async def test_a_pod_gets_a_real_loop_device_and_keeps_its_id_when_it_goes(node: Node, loop_device: LoopDevice) -> None:
    async with node.agent(chardev(f"/dev/loop{loop_device.number}*"), uevents="kernel", dev="/dev"):
        await asyncio.to_thread(loop_device.add)
        await node.healthy(loop_device.name)
        assert (await node.admit(pod())).phase == "Running"
        await asyncio.to_thread(loop_device.remove)
        await node.shows(lambda k: k.resources[WIDGET].unhealthy == {loop_device.name})
        await asyncio.to_thread(loop_device.add)
        await node.healthy(loop_device.name)


# --- injected uevents ---


@pytest.mark.needs("namespaces")
async def test_an_injected_uevent_alone_reaches_the_kubelet(node: Node) -> None:
    async with node.agent(uevents="kernel", prelude=ALONE + DEAF) as agent, injector(agent.pid) as inject:
        for _ in range(5):
            node.mknod("w1")
            await inject([("add", "w1")])
            await node.healthy("w1")
            node.unlink("w1")
            await inject([("remove", "w1")])
            await node.healthy()
        assert not agent.said("resync")


# --- bursts ---


SENT = """
import structlog
from agent.kubelet import plugin
class Told(plugin.Credit):
    def spend(self, now):
        structlog.get_logger().info("sent", at=now)
        super().spend(now)
plugin.Credit = Told
"""  # says by its own clock when it has sent a list


async def lists_are_apart(agent: AgentProcess) -> None:
    """However long a burst lasts, after the first three lists there is at most one in 50 ms."""
    await agent.says("sent", times=2)
    times = [line["at"] for line in agent.said("sent")]
    pairs = zip(times, times[CREDIT:], strict=False)
    assert all(later - earlier >= COALESCE * 0.999 for earlier, later in pairs)


async def is_told_of_changes(node: Node, inject: Inject | None = None) -> None:
    """Wait until the kernel tells the agent of nodes: the first list may come before that, since another look follows."""
    await node.healthy()
    node.mknod("wfirst")
    if inject is not None:
        await inject([("add", "wfirst")])
    await node.healthy("wfirst")


def flaps(node: Node, names: list[str]) -> None:
    """As many mknods and unlinks as `BURST`; the names that end in 0 are there in the end."""
    for _ in range(BURST // (2 * len(names))):
        node.mknod(*names)
        node.unlink(*names)
    node.mknod(*(name for name in names if name.endswith("0")))


NAMES = [f"w{n:03}" for n in range(100)]
LEFT = [name for name in NAMES if name.endswith("0")]


async def test_a_burst_of_nodes_ends_with_the_right_list(node: Node) -> None:
    async with node.agent(prelude=LENIENT + SENT) as agent:
        await node.healthy()
        await asyncio.to_thread(flaps, node, NAMES)
        node.mknod("wlast")
        await node.healthy(*LEFT, "wlast")
        await lists_are_apart(agent)


async def test_an_overflow_of_inotify_ends_with_the_right_list(node: Node) -> None:
    async with node.agent(prelude=SENT) as agent:
        await is_told_of_changes(node)
        agent.signal(signal.SIGSTOP)  # so that nothing is read and the kernel's queue of 16,384 events fills
        await until(lambda: Path(f"/proc/{agent.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "a stop")
        noise = [f"noise{n:03}" for n in range(100)]
        for _ in range(2):
            await asyncio.to_thread(flaps, node, noise)
            node.unlink(*(name for name in noise if name.endswith("0")))
        node.mknod(*LEFT)  # of which no event tells
        agent.signal(signal.SIGCONT)
        await agent.says("resync")
        await node.healthy("wfirst", *LEFT)
        await lists_are_apart(agent)
        assert len(agent.said("resync")) == 1


@pytest.mark.needs("namespaces")
async def test_a_burst_of_uevents_ends_with_the_right_list(node: Node) -> None:
    prelude = ALONE + DEAF + LENIENT + SENT
    async with node.agent(uevents="kernel", prelude=prelude) as agent, injector(agent.pid) as inject:
        await node.healthy()
        burst = [(action, name) for action in ("add", "remove") for name in NAMES] * (BURST // (2 * len(NAMES)))
        injected = asyncio.ensure_future(inject(burst))
        await asyncio.to_thread(flaps, node, NAMES)
        await injected
        await inject([("add", name) for name in NAMES])
        await node.healthy(*LEFT)
        await lists_are_apart(agent)
        assert not agent.said("resync")


SMALL_BUFFER = """
from agent.discovery import uevents
enlarge = uevents._enlarge
uevents._enlarge = lambda sock, _: enlarge(sock, 1 << 16)
"""


@pytest.mark.needs("namespaces")
async def test_an_overflow_of_uevents_ends_with_the_right_list(node: Node) -> None:
    prelude = ALONE + DEAF + SMALL_BUFFER
    async with node.agent(uevents="kernel", prelude=prelude) as agent, injector(agent.pid) as inject:
        await is_told_of_changes(node, inject)
        agent.signal(signal.SIGSTOP)
        await inject([("change", "noise")] * BURST)
        node.mknod(*LEFT)
        await inject([("add", name) for name in LEFT])  # dropped, all of them
        agent.signal(signal.SIGCONT)
        await agent.says("resync")
        await node.healthy("wfirst", *LEFT)
