"""What systemd is told by the real process, and what it leaves behind when the watchdog ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from agent.runtime import watchdog
from agent.simulation.model import Phase
from tests.e2e.node import Node, chardev, pod
from tests.e2e.process import AgentProcess
from tests.wait import limit

WATCHDOG: Final = 30.0  # seconds
FED: Final = "WATCHDOG=1"


class Systemd:
    """The notification socket of a service, whose messages are read."""

    def __init__(self, root: Path) -> None:
        self.address = root / "notify"
        self.heard: list[str] = []
        self._news = asyncio.Condition()

    @asynccontextmanager
    async def listening(self, watchdog: float = WATCHDOG) -> AsyncIterator[dict[str, str]]:
        """The environment of its service."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            sock.bind(str(self.address))
            task = asyncio.create_task(self._hear(sock))
            try:
                yield {"NOTIFY_SOCKET": str(self.address), "WATCHDOG_USEC": str(int(watchdog * 1e6))}
            finally:
                task.cancel()
                await asyncio.wait([task])

    async def _hear(self, sock: socket.socket) -> None:
        while True:
            message = await asyncio.get_running_loop().sock_recv(sock, 4096)
            async with self._news:
                self.heard.append(message.decode())
                self._news.notify_all()

    def said(self, start: str) -> int:
        """How many messages began like this."""
        return sum(message.startswith(start) for message in self.heard)

    async def hears(self, start: str, times: int = 1) -> None:
        """Wait until so many messages have begun like this."""
        async with limit(f"{times} messages {start}", seen=lambda: self.heard), self._news:
            await self._news.wait_for(lambda: self.said(start) >= times)


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    return Systemd(tmp_path)


async def test_it_is_ready_without_a_kubelet_feeds_the_watchdog_and_says_that_it_stops(
    bare_node: Node, systemd: Systemd
) -> None:
    config = bare_node.config(chardev())
    async with systemd.listening() as environment, AgentProcess(config, environment=environment) as agent:
        await systemd.hears("READY=1\nSTATUS=waiting for ")
        await agent.out_of_time(systemd.hears(FED, times=3))
        agent.signal(signal.SIGTERM)
        await systemd.hears("STOPPING=1")
        assert await agent.ended() == 0


async def test_every_part_shows_signs_of_life(node: Node, systemd: Systemd) -> None:
    async with systemd.listening() as told, node.agent(environment=told, uevents="kernel") as agent:
        passed = watchdog.SILENCE * 2.5
        await agent.out_of_time(systemd.hears(FED, times=int(passed / (WATCHDOG / 3))))
        assert not agent.said("not-alive")


LOOKS: Final = """
import structlog
from agent.runtime.watchdog import Watchdog
look = Watchdog.look
def looked(self):
    look(self)
    structlog.get_logger().info("looked")
Watchdog.look = looked
"""


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("kmsg.KmsgSource", "kernel's log"),
        ("uevents.LinkSource", "network interfaces"),
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
        f"{LOOKS}import anyio\nfrom agent.discovery import {module}\n"
        "async def run(self, *_, task_status=anyio.TASK_STATUS_IGNORED):\n"
        "    task_status.started()\n    await anyio.sleep_forever()\n"
        f"{source}.run = run\n"
    )
    config = bare_node.config(chardev(), uevents="kernel")
    async with systemd.listening() as environment, AgentProcess(config, prelude, environment) as agent:
        said = await agent.out_of_time(agent.says("not-alive"))
        assert f"{part} has shown no sign of life for " in said["reason"]
        events = [line["event"] for line in agent.log]
        fed = events[: events.index("not-alive")].count("looked")
        await agent.out_of_time(agent.says("looked", times=fed + 6))  # in which two of its periods pass
        agent.signal(signal.SIGTERM)
        await systemd.hears("STOPPING=1")
        assert systemd.said(FED) <= fed


async def test_a_loop_that_hangs_feeds_no_watchdog_and_its_end_shows_where_it_hung(
    bare_node: Node, systemd: Systemd
) -> None:
    period = 0.03
    prelude = (
        "import asyncio, structlog, threading, time\nfrom agent.runtime.watchdog import Watchdog\nlook = Watchdog.look\n"
        "def say(what):\n    structlog.get_logger().info(what)\n"
        f"def hang():\n    threading.Timer({3 * period}, say, ['three-periods-later']).start()\n"
        "    time.sleep(1000)\n"
        "def hanging(self):\n    look(self)\n    say('looked')\n    asyncio.get_running_loop().call_soon(hang)\n"
        "Watchdog.look = hanging\n"
    )
    config = bare_node.config(chardev())
    async with systemd.listening(period) as environment, AgentProcess(config, prelude, environment) as agent:
        await agent.says("three-periods-later")
        agent.signal(signal.SIGABRT)  # what systemd does then
        assert await agent.ended() == -signal.SIGABRT
        await systemd.hears(FED)
        assert systemd.said(FED) == len(agent.said("looked")) == 1
        told = [line["text"] for line in agent.said("no-json")]
        assert any("Current thread" in line for line in told)
        assert any("run_forever" in line for line in told)


async def test_after_a_kill_the_kubelets_view_is_whole_with_the_first_list(node: Node) -> None:
    names = [f"w{n}" for n in range(8)]
    node.mknod(*names)
    holder = pod(count=3)
    async with node.agent() as agent:
        await node.healthy(*names)
        assert (await node.admit(holder)).phase == Phase.RUNNING
        await agent.kill()
    since = len(node.lists)
    async with node.agent():
        await node.healthy(*names)
        (first, *_) = node.lists[since:]
        assert first.after is not None
        assert first.after.healthy == set(names), "the first list has all of them"
