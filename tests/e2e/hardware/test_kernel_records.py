"""What sysfs does not keep, from the kernel's word to the kubelet's list: lines of its log, facts that events bear."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.e2e.hardware.test_hotplug import ALONE
from tests.e2e.inject import injector
from tests.e2e.kmsg import USER, KernelLog
from tests.e2e.node import Node
from tests.e2e.process import AgentProcess

LAMP = "fl.test/lamp"
RESOURCE = f'[[resource]]\nname = "{LAMP}"\nbackend = "listening"\n'


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where the backend is installed."""
    site = tmp_path / "site"
    metadata = site / "fairlead_listening-1.0.dist-info"
    metadata.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "listening.py", site / "fairlead_listening.py")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fairlead-listening\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[fairlead.backends]\nlistening = fairlead_listening:Listening\n")
    return site


@pytest.fixture
def log(bare_node: Node) -> Iterator[KernelLog]:
    with KernelLog(bare_node.dev / "kmsg") as made:
        yield made


@asynccontextmanager
async def lamps(node: Node, site: Path, prelude: str = "", **settings: str) -> AsyncIterator[AgentProcess]:
    environment = {"PYTHONPATH": str(site)}
    async with node.agent(RESOURCE, prelude=prelude, environment=environment, **settings) as agent:
        yield agent


SLOW = """
from agent.discovery.discoverer import Discoverer
from agent.discovery import kmsg
made, init, read = [], Discoverer.__init__, kmsg.KmsgSource._read
def note(self, *arguments, **options):
    made.append(self)
    init(self, *arguments, **options)
async def slowly(self):
    for discoverer in made:
        await discoverer.first_scan.wait()
    await read(self)
Discoverer.__init__, kmsg.KmsgSource._read = note, slowly
"""  # a log so long that the first scan has ended before


async def test_what_was_logged_before_the_start_is_in_the_first_list(node: Node, site: Path, log: KernelLog) -> None:
    log.say("lamp lamp0: burnt out")
    async with lamps(node, site, prelude=SLOW):
        first = next(change for change in node.lists if change.resource == LAMP)
        assert first.after is not None
        assert first.after.healthy == {"lamp1"}
        assert first.after.unhealthy == {"lamp0"}


async def test_a_line_of_the_kernels_log_reaches_the_kubelet_in_one_list(
    node: Node, site: Path, log: KernelLog
) -> None:
    async with lamps(node, site):
        await node.healthy("lamp0", "lamp1", resource=LAMP)
        since = len(node.lists)
        log.say("usb 1-2: new high-speed USB device")
        log.say("lamp lamp1: burnt out", facility=USER)
        log.say("lamp lamp0: burnt out")
        await node.healthy("lamp1", resource=LAMP)
        assert len(node.lists) == since + 1


async def test_a_line_that_a_backend_cannot_take_is_reported_once_and_the_next_one_counts(
    node: Node, site: Path, log: KernelLog
) -> None:
    async with lamps(node, site) as agent:
        for _ in range(3):
            log.say("lamp lamp1: flickers")
        log.say("lamp lamp0: burnt out")
        await node.healthy("lamp1", resource=LAMP)
        await agent.says("discovery-problem")
        (line,) = agent.said("discovery-problem")
        assert "signals() failed on Record(" in line["reason"]
        assert "lamp lamp1: flickers" in line["reason"]


async def test_a_log_that_is_missing_is_said_once_and_read_when_it_is_there(node: Node, site: Path) -> None:
    async with lamps(node, site) as agent:
        await node.healthy("lamp0", "lamp1", resource=LAMP)
        line = await agent.says("part-restarts", part="kernel's log")
        assert "the kernel's log cannot be read" in line["reason"]
        with KernelLog(node.dev / "kmsg") as log:
            log.say("lamp lamp0: burnt out")
            await node.healthy("lamp1", resource=LAMP)
            assert len(agent.said("part-restarts")) == 1  # here: once it is closed it is at its end


@pytest.mark.needs("namespaces")
async def test_a_fact_that_an_event_bears_reaches_the_kubelet(node: Node, site: Path, log: KernelLog) -> None:
    async with (
        lamps(node, site, prelude=ALONE, uevents="kernel") as agent,
        injector(agent.pid) as inject,
    ):
        await node.healthy("lamp0", "lamp1", resource=LAMP)
        await inject([("change", "lamp0")])
        await inject([("change", "lamp0 LAMP=lamp0")])
        await node.healthy("lamp1", resource=LAMP)
