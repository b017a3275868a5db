"""What systemd is told by the real process, and what it leaves behind when the watchdog ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from agent.simulation.pods import Phase
from tests.e2e.node import Node, chardev, pod
from tests.e2e.process import AgentProcess
from tests.wait import PATIENCE

WATCHDOG: Final = 0.3  # seconds
BOUND: Final = 3.0  # seconds; the benchmark `exec_to_whole` has the figure


class Systemd:
    """The notification socket of a service, whose messages are read."""

    def __init__(self, root: Path) -> None:
        self.address = root / "notify"
        self.heard: list[str] = []
        self._news = asyncio.Condition()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[dict[str, str]]:
        """The environment of its service."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.bind(str(self.address))
            task = asyncio.create_task(self._hear(sock))
            try:
                yield {"NOTIFY_SOCKET": str(self.address), "WATCHDOG_USEC": str(int(WATCHDOG * 1e6))}
            finally:
                task.cancel()
                await asyncio.wait([task])

    async def _hear(self, sock: socket.socket) -> None:
        while True:
            message = await asyncio.get_running_loop().sock_recv(sock, 4096)
            async with self._news:
                self.heard.append(message.decode())
                self._news.notify_all()

    async def hears(self, start: str, times: int = 1) -> None:
        """Wait for so many messages that begin like this, from now on."""
        since = len(self.heard)
        async with asyncio.timeout(PATIENCE), self._news:
            await self._news.wait_for(lambda: sum(said.startswith(start) for said in self.heard[since:]) >= times)

    async def falls_silent(self, start: str) -> None:
        """Wait until no message that begins like this has come for two periods; what was sent before may come late."""
        async with asyncio.timeout(PATIENCE):
            with suppress(TimeoutError):
                while True:
                    await asyncio.wait_for(self.hears(start), 2 * WATCHDOG)


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path)


async def test_it_is_ready_without_a_kubelet_feeds_the_watchdog_and_says_that_it_stops(
    bare_node: Node, systemd: Systemd
) -> None:
    config = bare_node.config(chardev())
    async with systemd.listening() as environment, AgentProcess(config, environment=environment) as agent:
        await systemd.hears("READY=1\nSTATUS=waiting for ")
        await systemd.hears("WATCHDOG=1", times=3)
        agent.signal(signal.SIGTERM)
        await systemd.hears("STOPPING=1")
        assert await agent.ended() == 0


HASTY: Final = "from agent import watchdog\nwatchdog.BEAT, watchdog.SILENCE = 0.05, 1.0\n"


@pytest.mark.root
async def test_every_part_shows_signs_of_life(node: Node, systemd: Systemd) -> None:
    async with systemd.listening() as told, node.agent(prelude=HASTY, environment=told, uevents="kernel"):
        await systemd.hears("WATCHDOG=1", times=25)  # which takes 2.5 times as long as anyone may be silent


@pytest.mark.root
@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("kmsg.KmsgSource", "kernel's log"),
        ("links.LinkSource", "network interfaces"),
        ("paths.PathSource", "inotify"),
        ("uevents.UeventSource", "uevents"),
        ("paths.DirectoryWatch", "kubelet's directory"),
    ],
)
async def test_a_part_that_hangs_is_named_and_the_watchdog_is_not_fed(
    bare_node: Node, systemd: Systemd, source: str, part: str
) -> None:
    module = source.partition(".")[0]
    prelude = (
        f"{HASTY}import anyio\nfrom agent.devices.sources import {module}\n"
        "async def run(self, *, task_status=anyio.TASK_STATUS_IGNORED):\n"
        "    task_status.started()\n    await anyio.sleep_forever()\n"
        f"{source}.run = run\n"
    )
    config = bare_node.config(chardev(), uevents="kernel")
    async with systemd.listening() as environment, AgentProcess(config, prelude, environment) as agent:
        said = await agent.says("not-alive")
        assert f"{part} has shown no sign of life for " in said["reason"]
        await systemd.falls_silent("WATCHDOG=1")


async def test_a_loop_that_hangs_feeds_no_watchdog_and_its_end_shows_where_it_hung(
    bare_node: Node, systemd: Systemd
) -> None:
    prelude = (
        "import asyncio, time\nfrom agent.watchdog import Watchdog\nlook = Watchdog.look\n"
        "def hanging(self):\n    look(self)\n    asyncio.get_running_loop().call_later(0.2, time.sleep, 1000)\n"
        "Watchdog.look = hanging\n"
    )
    config = bare_node.config(chardev())
    async with systemd.listening() as environment, AgentProcess(config, prelude, environment) as agent:
        await systemd.hears("WATCHDOG=1")
        await systemd.falls_silent("WATCHDOG=1")
        agent.signal(signal.SIGABRT)  # what systemd does then
        assert await agent.ended() == -signal.SIGABRT
        told = [line["text"] for line in agent.said("no-json")]
        assert any("Current thread" in line for line in told)
        assert any("run_forever" in line for line in told)


async def test_after_a_kill_the_kubelets_view_is_whole_again_at_once(node: Node) -> None:
    names = [f"w{n}" for n in range(8)]
    node.mknod(*names)
    holder = pod(count=3)
    async with node.agent() as agent:
        await node.healthy(*names)
        assert (await node.admit(holder)).phase == Phase.RUNNING
        await agent.kill()
    since, took = len(node.lists)()
    async with node.agent():
        await node.healthy(*names)
        assert took.seconds < BOUND
        (first, *_) = node.lists[since:]
        assert first.after is not None
        assert first.after.healthy == set(names), "the first list has all of them"
