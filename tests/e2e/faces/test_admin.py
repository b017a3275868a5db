"""The admin socket of a real daemon: what operators decide reaches the kubelet, and nobody on it harms a pod."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from agent.console.control import Client, NoDaemonError
from agent.console.views import Event, Held
from agent.simulation.model import Phase
from tests.e2e.daemon.test_adversity import OFTEN
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.pods.test_claims import OFTEN_ASKING
from tests.e2e.process import MAIN, AgentProcess, Process, finish
from tests.wait import limit, until

NOBODY = 65534


@contextmanager
def asking(path: Path) -> Iterator[Client]:
    client = Client(path)
    try:
        yield client
    finally:
        client.close()


# --- drains ---


async def test_a_drain_shows_at_the_kubelet_at_once_and_survives_a_kill(node: Node) -> None:
    node.mknod("w1", "w2")
    async with node.agent() as agent:
        config = str(node.root / "config.toml")
        await node.healthy("w1", "w2")
        with asking(node.admin) as client:
            drained = await client.drain("w1", "new fan", None)
            await node.healthy("w2")  # which no poll would have shown: node.config has them come after a day
        assert (drained.ids, drained.held) == (("w1",), ())
        assert (node.kubelet.resources[WIDGET].capacity, node.kubelet.resources[WIDGET].allocatable) == (2, 1)
        await agent.kill()
        await node.shows(lambda k: not k.streams(WIDGET))
        since = len(node.lists)
        async with AgentProcess(node.root / "config.toml"):
            await node.registered()
            await node.healthy("w2")
            lists = [change.after for change in node.lists[since:]]
            assert all(after is not None and "w1" not in after.healthy for after in lists)
            code, out, _ = await finish("undrain", "--config", config, "w1")
            assert (code, out) == (0, "Back in service: w1 (ended: drained).\n")
            await node.healthy("w1", "w2")


async def test_a_pod_keeps_a_device_that_is_drained_and_who_it_is_is_told(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(prelude=OFTEN_ASKING):
        assert (await node.admit(pod("trainer"))).phase == Phase.RUNNING
        with asking(node.admin) as client:
            assert (await client.drain("/dev/w1", "", None)).held == ("w1",)
            held = await _held(client)
            assert [(who.pod, who.container) for who in held[0].holders] == [("trainer", "main")]
        code, out, _ = await finish("status", "--pods", "--config", str(node.root / "config.toml"))
        assert (code, out.splitlines()[1].split()) == (0, ["default/trainer", "main", "w1", WIDGET, "w1"])


async def _held(client: Client) -> tuple[Held, ...]:
    """Who holds what, once the daemon has asked the kubelet, some time after the Allocate."""
    async with limit("the name of the holder"):
        while not ((held := (await client.explain("w1")).held) and any(who.pod for who in held[0].holders)):
            pass
    return held


async def test_what_happens_is_told_to_who_watches(node: Node) -> None:
    node.mknod("w1")
    async with node.agent():
        with asking(node.admin) as client:
            async with following(client) as events:
                node.unlink("w1")
                gone = await _event(events, "device-changed")
                assert (gone.resource, gone.device, gone.state) == (WIDGET, "/dev/w1", "Gone")
                node.mknod("w1")
                assert (await _event(events, "device-changed")).state == "Healthy"
                await node.healthy("w1")
                assert (await node.admit(pod())).phase == "Running"
                assert (await _event(events, "allocated")).device == "w1"
        code, out, _ = await finish("events", "--json", "-n", "1", "--config", str(node.root / "config.toml"))
        assert (code, json.loads(out)["kind"]) == (0, "allocated")


async def test_status_watch_shows_each_change_and_outlives_the_daemon(node: Node) -> None:
    node.mknod("w1", "w2")
    async with node.agent() as agent:
        await node.healthy("w1", "w2")
        config = str(node.root / "config.toml")
        async with Process("status", "--watch", "--config", config) as shown:

            async def row() -> list[str]:
                """Of the next picture."""
                async with limit("a row of the resource", seen=lambda: agent.log):
                    while not (line := await shown.stdout.readline()).startswith(WIDGET.encode()):
                        assert line, await shown.stderr.read()
                return line.decode().split()

            assert await row() == [WIDGET, "registered", "2", "0", "0", "0", "0"]
            node.unlink("w1")
            while await row() != [WIDGET, "registered", "1", "0", "0", "0", "0"]:
                pass
            agent.signal(signal.SIGTERM)
            async with limit("a word that it waits"):
                assert b"waiting for Fairlead since" in await shown.stderr.readline()
            await agent.ended()
            node.mknod("w1")
            async with node.agent():
                while await row() != [WIDGET, "registered", "2", "0", "0", "0", "0"]:
                    pass
            shown.signal(signal.SIGTERM)


async def test_events_are_told_whatever_the_log_prints(node: Node) -> None:
    node.mknod("w1")
    prelude = "import sys; sys.argv += ['--log-level', 'error']"
    config = node.config(chardev())
    async with AgentProcess(config, prelude) as agent:
        await node.registered()
        wanted = {"ready", "resource-listed", "registered"}
        with asking(node.admin) as client:
            async with limit(f"the events {wanted}"):
                while not wanted <= {event.kind async for event in client.watch(100, follow=False)}:
                    pass
        assert not agent.said("registered")


@asynccontextmanager
async def following(client: Client) -> AsyncIterator[asyncio.Queue[Event]]:
    """The events from now on."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    began = asyncio.Event()

    async def follow() -> None:
        async for event in client.watch(1, follow=True):
            events.put_nowait(event)
            began.set()

    task = asyncio.create_task(follow())
    async with limit("the first event"):
        await began.wait()
    try:
        yield events
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _event(events: asyncio.Queue[Event], kind: str) -> Event:
    async with limit(f"an event {kind}"):
        while (event := await events.get()).kind != kind:
            pass
    return event


# --- who may ask ---


@pytest.mark.needs("root", "device nodes")
async def test_only_root_reaches_the_socket_and_only_root_is_answered(node: Node) -> None:
    node.root.chmod(0o755)
    async with node.agent() as agent:
        assert "may be used by root only" in await _as_nobody(node)
        node.admin.chmod(0o666)  # as if it were handed on, or mounted by somebody careless
        for _ in range(3):
            assert f"user {NOBODY} may not ask this" in await _as_nobody(node)
        assert len(agent.said("admin-call-refused", uid=NOBODY)) == 1


async def _as_nobody(node: Node) -> str:
    """What `status` says to a user without rights."""
    (node.root / "here.toml").write_text('[agent]\nadmin_socket = "admin.sock"\n')  # the way there is closed to it
    ids = f"os.setgid({NOBODY}); os.setuid({NOBODY})"
    code = f"import os; from agent.cli import status; os.chdir({str(node.root)!r}); {ids}; {MAIN}"
    async with Process("status", "--config", "here.toml", code=code) as process:
        returncode, _, err = await process.finished()
    assert returncode == 1
    return err


# --- what may come ---


async def test_pods_get_devices_while_200_connections_to_the_admin_socket_are_open(node: Node) -> None:
    node.mknod(*(f"w{n}" for n in range(10)))
    async with node.agent() as agent:
        files = agent.open_files()
        with ExitStack() as open_sockets:
            for number in range(200):
                sock = open_sockets.enter_context(socket.socket(socket.AF_UNIX))
                sock.connect(str(node.admin))
                with suppress(OSError):
                    sock.send(os.urandom(200) if number % 2 else b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            for n in range(10):
                assert (await node.admit(pod(f"besieged-{n}"))).phase == Phase.RUNNING
            with asking(node.admin) as client:
                assert (await client.status()).resources[0].streaming
            assert agent.open_files() > files + 90, "those that say nothing more are still open"
        await until(lambda: agent.open_files() < files + 20, "the end of the connections", seen=agent.open_files)
        assert not agent.said("part-failed")


async def test_who_does_not_read_holds_up_nobody(node: Node) -> None:
    node.mknod("w1")
    async with node.agent() as agent:
        config = str(node.root / "config.toml")
        async with Process("events", "--follow", "--config", config) as watcher:
            async with limit("the first event"):
                assert b"starting" in await watcher.stdout.readline()
            watcher.signal(signal.SIGSTOP)
            with asking(node.admin) as client:
                for n in range(20):
                    await client.drain("w1", f"{n}" * 20_000, None)
                    await client.undrain("w1")
                await node.healthy("w1")
                last = [event async for event in client.watch(1, follow=False)]
                assert last[0].kind in ("undrained", "device-changed")
            assert (await node.admit(pod())).phase == Phase.RUNNING
            assert not agent.said("part-failed")
            agent.signal(signal.SIGTERM)
            assert await agent.ended() == 0


# --- the socket ---


async def test_a_socket_that_is_removed_is_made_again(node: Node) -> None:
    prelude = "from agent.console import service; service._LOOK_AGAIN = 0.01"
    async with node.agent(prelude=prelude):
        await until(node.admin.exists, "the socket")
        node.admin.unlink()
        await until(node.admin.exists, "another socket")
        with asking(node.admin) as client:
            assert (await client.status()).version


async def test_an_unusable_place_is_said_once_and_ends_nothing(node: Node) -> None:
    node.mknod("w1")
    (node.root / "file").touch()
    often = "from agent.runtime import watchdog; watchdog._FIRST_DELAY = watchdog._MOST_DELAY = 0.01"
    async with node.agent(prelude=often, admin_socket=str(node.root / "file/admin.sock")) as agent:
        said = await agent.says("part-restarts", part="admin socket")
        assert "File exists" in said["reason"]
        assert (await node.admit(pod())).phase == Phase.RUNNING
        await agent.takes_turns(OFTEN)
        assert len(agent.said("part-restarts", part="admin socket")) == 1


async def test_a_second_agent_leaves_the_socket_to_the_first_until_it_is_gone(node: Node) -> None:
    async with node.agent() as first, AgentProcess(node.config(chardev())) as second:
        await second.says("admin-socket-taken", reason=f"process {first.pid} has {node.admin}")
        await second.says("another-agent-runs")
        with asking(node.admin) as client:
            assert not (await client.status()).kubelet.waiting_for
        await first.kill()
        await second.says("took-over")
        await until(lambda: _answers(node.admin), "the second agent's answer")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


async def test_without_a_daemon_there_is_a_sentence(node: Node) -> None:
    with asking(node.admin) as client, pytest.raises(NoDaemonError, match="no Fairlead answers"):
        await client.status()
