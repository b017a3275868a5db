"""An agent that is told to end hands the node over to one that stands by: the kubelet has every device at every moment."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.simulation.model import Change, Container, Kind, Phase, Pod, Version
from tests.console.http.serving import free_port
from tests.e2e.node import UNHURRIED, Node, chardev, pod
from tests.e2e.process import AgentProcess, Process, finish
from tests.wait import PATIENCE, limit, until

EACH = 3
NAMES = [f"fl.test/kind{number}" for number in range(4)]
RESOURCES = [chardev(f"/dev/{number}-*", name) for number, name in enumerate(NAMES)]
HOLDER = Pod("holder", (Container("main", dict.fromkeys(NAMES, 1)),))

PATIENT = """
from agent.daemon import shutdown, handover as giving, serving
from agent.kubelet import handover_socket as handover, registration
giving._MAY_TAKE = giving._UNDER_WAY = giving._AT_MOST = giving._SILENT_AT_MOST = 3600.0
serving._TAKEN_WITHIN = shutdown.LEAVE = 3600.0
handover._SAYS_WITHIN = handover._COMES_WITHIN = handover._ENDS_WITHIN = handover._GIVES_WITHIN = 3600.0
registration._SEEN_BY_KUBELET = 0.5
"""
"""A prelude: on a machine however busy, one that lives is not taken for one that hangs, and a kubelet sees a stream's end."""


@pytest.fixture(params=["1.36", "1.37"])
def version(request: pytest.FixtureRequest) -> Version:
    version: Version = request.param
    return version


def plant(node: Node) -> None:
    node.mknod(*(f"{number}-{one}" for number in range(len(NAMES)) for one in range(EACH)))


def standby(node: Node, prelude: str = "") -> AgentProcess:
    return AgentProcess(node.config(*RESOURCES), UNHURRIED + PATIENT + prelude)


def gaps(changes: list[Change]) -> list[Change]:
    """When the kubelet lacked a device of a resource, or had it only as unhealthy."""
    return [it for it in changes if it.kind is Kind.DISCONNECTED or (it.after and len(it.after.healthy) < EACH)]


async def assert_served(node: Node) -> None:
    """Every device is healthy, by one stream of each resource; the kubelet's client is the one that serves."""
    await node.kubelet.wait_for(
        lambda k: all(len(k.resources[name].healthy) == EACH and k.streams(name) == 1 for name in NAMES), PATIENCE
    )
    assert node.kubelet.panics == []
    assert [len(node.held(HOLDER, resource=name)) for name in NAMES] == [1] * len(NAMES)


async def assert_gives(node: Node, name: str) -> None:
    """A pod gets a device: at the latest once the kubelet has dealt with the end of the process that died (A2)."""
    async with limit("a pod that gets a device"):
        for turn in itertools.count():
            await asyncio.sleep(
                0
            )  # a call over a connection that is lost fails at once: the kubelet must go on meanwhile
            if (await node.admit(pod(f"{name}{turn}", NAMES[0]))).phase == Phase.RUNNING:
                return


async def test_a_standby_takes_over_and_the_kubelet_has_every_device_at_every_moment(node: Node) -> None:
    plant(node)
    changes: list[Change] = []
    async with node.agent(*RESOURCES, prelude=PATIENT) as first:
        assert (await node.admit(HOLDER)).phase == Phase.RUNNING
        node.kubelet.subscribe(changes.append)
        agent, refused = first, []
        for turn in range(10):
            successor = standby(node)
            await successor.__aenter__()
            await agent.says("standby-ready")
            agent.signal(signal.SIGTERM)
            pods = [pod(f"p{turn}-{number}", name) for number, name in enumerate(NAMES)]
            asked = [asyncio.create_task(node.admit(one)) for one in pods]
            assert await agent.ended() == 0
            refused += [one for one in await asyncio.gather(*asked) if one.phase != Phase.RUNNING]
            for one in pods:
                node.kubelet.end(one)
            assert agent.said("handed-over")
            if agent is not first:
                await agent.__aexit__(None, None, None)
            agent = successor
            await assert_served(node)
        assert refused == []
        assert gaps(changes) == []
        await agent.kill()  # which the kubelet sees: it knows the last one's client
        await node.kubelet.wait_for(lambda k: not any(k.resources[name].healthy for name in NAMES), PATIENCE)
        await agent.__aexit__(None, None, None)


STALLS = [
    ("lock.Lock", "take", "after"),
    ("handover.Predecessor", "decided", "before"),
    ("handover.Predecessor", "decided", "after"),
    ("registration.Registrar", "_announce", "before"),
    ("registration.Registrar", "_announce", "after"),
    ("handover.Predecessor", "end", "after"),
    ("handover.Predecessor", "done", "before"),
]
"""Where a standby is stopped once it is told to take: a call's owner and name, and whether before it or after."""

STOPS = """
import inspect, os, signal
from agent.kubelet import handover_socket as handover, lock, registration

TOLD, heard = [], handover._words
async def words(reader):
    async for word, what in heard(reader):
        TOLD.extend(['told'] * (word == 'take'))
        yield word, what
handover._words = words

def stop(owner, name, when):
    real = getattr(owner, name)
    def end(at):
        if at == when and len(TOLD) == 1:
            TOLD.append('stopped')
            os.kill(os.getpid(), signal.SIGSTOP)
    def call(*args, **named):
        end("before")
        result = real(*args, **named)
        end("after")
        return result
    async def wait(*args, **named):
        end("before")
        result = await real(*args, **named)
        end("after")
        return result
    setattr(owner, name, wait if inspect.iscoroutinefunction(real) else call)
"""
"""A prelude: `stop` stops the process before or after a call, once, and not before it was told to take."""


@pytest.mark.parametrize(
    ("version", "stall"),
    [  # where it is among the two agents alone one kubelet does, by turns
        *((("1.36", "1.37")[number % 2], stall) for number, stall in enumerate(STALLS) if "Registrar" not in stall[0]),
        *((version, stall) for version in ("1.36", "1.37") for stall in STALLS if "Registrar" in stall[0]),
    ],
    ids=lambda it: it if isinstance(it, str) else " ".join(it),
)
async def test_a_standby_that_stalls_costs_no_device_and_has_the_node_once_it_goes_on(
    node: Node, stall: tuple[str, str, str]
) -> None:
    plant(node)
    owner, name, when = stall
    changes: list[Change] = []
    hasty = PATIENT + "giving._MAY_TAKE = giving._SILENT_AT_MOST = 3.0\n"
    step = f"stop({owner}, {name!r}, {when!r})"

    def goes_on() -> object:
        second.signal(signal.SIGCONT)
        return first.said("handed-over")

    async with node.agent(*RESOURCES, prelude=hasty) as first, standby(node, STOPS + step) as second:
        assert (await node.admit(HOLDER)).phase == Phase.RUNNING
        await first.says("standby-ready")
        node.kubelet.subscribe(changes.append)
        first.signal(signal.SIGTERM)
        await first.says("standby-lost")
        registered = len(NAMES) * (
            1 if stall in STALLS[:2] else 2
        )  # where the kubelet may listen to the standby by now
        await until(lambda: len(first.said("registered")) >= registered, "to serve again")
        await assert_gives(node, "meanwhile")
        assert gaps(changes) == []
        await until(goes_on, "a hand-over to the standby that goes on", lambda: (first.log, second.log))
        assert await first.ended() == 0
        await assert_served(node)
        await assert_gives(node, "after")


READ_ONLY = """
import errno, os
from agent.kubelet import server
whole = server._listen
def listen(path, mode):
    if os.path.exists({file!r}) and path.parent.name == "fairlead":
        raise OSError(errno.EROFS, "Read-only file system", str(path))
    return whole(path, mode)
server._listen = listen
"""
"""A prelude: no socket can be made in our directory while that file is there."""


async def test_a_disk_that_is_read_only_while_a_standby_takes_over_is_waited_for(node: Node) -> None:
    plant(node)
    changes: list[Change] = []
    file = node.root / "read-only"
    async with node.agent(*RESOURCES, prelude=PATIENT + READ_ONLY.format(file=str(file))) as first, standby(node):
        assert (await node.admit(HOLDER)).phase == Phase.RUNNING
        await first.says("standby-ready")
        node.kubelet.subscribe(changes.append)
        file.touch()
        first.signal(signal.SIGTERM)
        line = await first.says("not-registered")
        assert line["reason"] == f"Read-only file system: {node.sockets}"
        await assert_gives(node, "meanwhile")
        file.unlink()
        assert await first.ended() == 0
        assert not first.said("standby-lost")
        await assert_served(node)
        await assert_gives(node, "after")
        assert gaps(changes) == []


async def test_where_the_disk_is_read_only_for_both_the_agent_before_serves_until_it_is_not(node: Node) -> None:
    plant(node)
    changes: list[Change] = []
    file = node.root / "read-only"
    fault = READ_ONLY.format(file=str(file))
    hasty = PATIENT + "giving._MAY_TAKE = giving._SILENT_AT_MOST = giving._AT_MOST = 2.0\n" + fault
    async with node.agent(*RESOURCES, prelude=hasty) as first, standby(node, fault) as second:
        assert (await node.admit(HOLDER)).phase == Phase.RUNNING
        await first.says("standby-ready")
        node.kubelet.subscribe(changes.append)
        file.touch()
        first.signal(signal.SIGTERM)
        await second.says("plugin-directory-unusable")
        await first.says("standby-lost")
        await assert_gives(node, "meanwhile")
        assert gaps(changes) == []
        file.unlink()
        assert await first.ended() == 0
        await assert_served(node)
        await assert_gives(node, "after")


@asynccontextmanager
async def on_its_own(node: Node) -> AsyncIterator[AgentProcess]:
    """An agent that is no child of the tests' server: its command line is one that another process can have."""
    async with AgentProcess(node.config(*RESOURCES), PATIENT, wrapper=["env"]) as agent:
        await node.registered(*NAMES)
        assert (await node.admit(HOLDER)).phase == Phase.RUNNING
        yield agent


async def test_fairlead_handover_has_a_new_process_serve_the_node_and_the_old_one_end(node: Node) -> None:
    plant(node)
    changes: list[Change] = []
    async with on_its_own(node) as agent:
        node.kubelet.subscribe(changes.append)
        code, out, err = await finish("handover", "--config", str(node.root / "config.toml"))
        assert (code, err) == (0, "")
        new = int(out.split()[1])
        try:
            assert await Process.ended(agent) == 0  # its log goes on: the new one writes it
            assert gaps(changes) == []
            await assert_served(node)
        finally:
            os.kill(new, signal.SIGKILL)


async def test_a_command_that_is_interrupted_leaves_the_node_served(node: Node) -> None:
    plant(node)
    async with on_its_own(node) as agent:
        async with Process("handover", "--config", str(node.root / "config.toml")) as command:
            await agent.says("standby-ready")
            command.signal(signal.SIGINT)
            await command.ended()
        new = int((await agent.says("handed-over"))["standby"].split()[0])
        try:
            assert await Process.ended(agent) == 0
            await assert_served(node)
        finally:
            os.kill(new, signal.SIGKILL)


async def test_where_the_new_process_cannot_start_the_old_one_serves_on_and_the_command_says_why(node: Node) -> None:
    plant(node)
    async with on_its_own(node) as agent:
        config = node.config(*RESOURCES, '[[resource]]\nname = "nonsense"\n')
        await agent.says("config-invalid")
        code, _, err = await finish("handover", "--config", str(config))
        assert code == 1
        assert "ended with exit code 2; the log says why" in err
        await assert_served(node)
        assert not agent.said("handing-over")


async def test_several_commands_at_once_are_one_hand_over_and_the_successor_can_be_replaced_in_turn(node: Node) -> None:
    plant(node)
    async with on_its_own(node) as agent:
        config = str(node.root / "config.toml")
        said = await asyncio.gather(*(finish("handover", "--config", config) for _ in range(3)))
        assert {code for code, _, _ in said} == {0}
        (first,) = {int(out.split()[1]) for _, out, _ in said}
        assert await Process.ended(agent) == 0  # so that its successor is a child of process 1, or of who adopts
        await until(
            (node.root / "admin.sock").exists, "the successor's socket"
        )  # which looks each 0.1 s whether it is free
        code, out, err = await finish("handover", "--config", config)
        assert (code, err) == (0, "")
        second = int(out.split()[1])
        try:
            assert second != first
            await assert_served(node)
        finally:
            os.kill(second, signal.SIGKILL)


async def test_a_new_process_that_never_gets_ready_is_ended_and_leaves_no_zombie(node: Node) -> None:
    plant(node)
    hangs = f"import os, time\nif os.path.exists('{node.root}/hangs'): time.sleep(1000)\n"
    hasty = hangs + "from agent.daemon import shutdown\nshutdown._READY_WITHIN = 1.0\n"
    async with AgentProcess(node.config(*RESOURCES), PATIENT + hasty, wrapper=["env"]) as agent:
        await node.registered(*NAMES)
        (node.root / "hangs").touch()
        code, _, err = await finish("handover", "--config", str(node.root / "config.toml"))
        assert code == 1
        assert "was not ready within 1 s" in err
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
        await until(lambda: children.read_text() == "", "no child", children.read_text)


async def test_at_no_moment_of_a_hand_over_another_process_can_listen_at_the_port_of_http(node: Node) -> None:
    plant(node)
    port = free_port()
    http = f'[http]\nlisten = "127.0.0.1:{port}"\n'
    async with node.agent(*RESOURCES, http, prelude=PATIENT) as first:
        await first.says("http-served")
        async with AgentProcess(node.config(*RESOURCES, http), UNHURRIED + PATIENT) as second:
            await first.says("standby-ready")

            def is_served() -> bool:
                with socket.socket() as thief:
                    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    with pytest.raises(OSError, match="in use"):
                        thief.bind(("127.0.0.1", port))
                return bool(second.said("http-served"))

            first.signal(signal.SIGTERM)
            await until(is_served, "HTTP of the new one", lambda: second.log)
            assert await first.ended() == 0
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                async with limit("an answer"):
                    assert (await asyncio.to_thread(client.recv, 100)).startswith(b"HTTP/1.1 200 ")
