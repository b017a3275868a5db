"""Kubelet contract: A1, A2, A6."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from grpclib.client import Channel
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream
from structlog.testing import capture_logs

from agent.discovery.paths import Change as PathChange
from agent.discovery.paths import DirectoryWatch
from agent.kubelet import kubelet_socket, registration
from agent.kubelet.allocation import plain
from agent.kubelet.api.v1beta1 import DevicePluginOptions, Empty, RegisterRequest, RegistrationBase
from agent.kubelet.kubelet_socket import Kubelet, RegistrationError
from agent.kubelet.plugin import Plugin
from agent.kubelet.registration import Registrar
from agent.kubelet.server import SocketServer
from agent.kubelet.wire import Encoded, PluginOptions, PreferredRequest
from agent.runtime.pacing import Doorbell
from agent.simulation import plugin_client
from agent.simulation.kubelet import DISCONNECT_DELAY
from agent.simulation.kubelet import Kubelet as SimulatedKubelet
from agent.simulation.model import Change, Container, Kind, Phase, Pod, Version
from agent.simulation.plugin_client import PluginClient
from tests.kubelet.plugins import TOY, Lists, more_than_fits, nothing
from tests.wait import PATIENCE, limit, pass_time, settled, until

HOURS = 36_000.0  # seconds; what would come later by itself comes after them
TURNS = 28  # of the event loop; all resources are registered after 23


class Agent:
    """The part of the agent that registers, with the kubelet's directory watched as the supervisor does."""

    def __init__(self, plugin_dir: Path, *resources: str) -> None:
        self.plugin_dir = plugin_dir
        self.kubelet = Kubelet(plugin_dir / "kubelet.sock")
        self.plugins = {name: Plugin(name, nothing) for name in resources}
        self.registrars = {name: Registrar(plugin, self.kubelet, plugin_dir) for name, plugin in self.plugins.items()}
        for plugin in self.plugins.values():
            Lists(plugin).put("a", "b")
        self.deaf = False
        self._watch = DirectoryWatch(self._changed, self.kubelet.look)
        self._watch.watch(frozenset({plugin_dir}))
        self._tasks: anyio.abc.TaskGroup

    def _changed(self, path: Path, change: PathChange) -> None:
        if path == self.kubelet.socket and change is PathChange.CREATED and not self.deaf:
            self.kubelet.look()

    async def __aenter__(self) -> Agent:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        await self._tasks.start(self._watch.run)
        self.kubelet.look()
        for registrar in self.registrars.values():
            self._tasks.start_soon(registrar.run)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(*exc)

    @property
    def plugin(self) -> Plugin:
        return self.plugins[TOY]

    @property
    def registrar(self) -> Registrar:
        return self.registrars[TOY]

    @property
    def server(self) -> SocketServer:
        return self.registrar._server

    @property
    def socket(self) -> Path:
        return self.server.path

    def break_connections(self) -> None:
        """All that the kubelet has to us break."""
        for registrar in self.registrars.values():
            registrar._server.reset_connections()


@pytest.fixture(params=["1.36", "1.37"])
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Version:
    """Which kubelet; it is known by whether it closes a connection (A12), and this machine may be busy."""
    version: Version = request.param
    monkeypatch.setattr(registration, "_KEPT_AFTER", HOURS if version == "1.37" else 0.0)
    return version


@pytest.fixture
async def node(tmp_path: Path, version: Version) -> SimulatedKubelet:
    (tmp_path / "device-plugins").mkdir()
    return SimulatedKubelet(tmp_path, version=version)


@asynccontextmanager
async def running(node: SimulatedKubelet, *resources: str) -> AsyncIterator[Agent]:
    """A kubelet and an agent; the kubelet goes first, so that the agent's end is seen to be clean without one."""
    async with Agent(node.plugin_dir, *(resources or (TOY,))) as agent:
        try:
            yield agent
        finally:
            await node.stop()


def well(agent: Agent) -> Callable[[SimulatedKubelet], bool]:
    """Whether every resource is registered, healthy, and on exactly one stream."""

    def is_well(node: SimulatedKubelet) -> bool:
        return all(
            name in node.resources
            and node.resources[name].allocatable == 2
            and node.streams(name) == 1
            and agent.registrars[name].registered
            for name in agent.plugins
        )

    return is_well


async def stays_well(node: SimulatedKubelet, agent: Agent) -> None:
    """Everything is well, and nothing is under way that would change it."""
    await until(lambda: well(agent)(node), "every resource is well", node._summary)
    pass_time(2 * DISCONNECT_DELAY)  # in which the kubelet deals with streams that have ended
    await settled()
    assert well(agent)(node)


class Tries:
    """What each registrar waits for between two tries, which passes at once; while `held`, a wait takes hours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.delays: defaultdict[str, list[float]] = defaultdict(list)
        self.held = False
        wait, loop = Registrar._wait_to_retry, asyncio.get_running_loop()

        async def noted(registrar: Registrar, delay: float, generation: int) -> bool:
            self.delays[registrar.plugin.resource].append(delay)
            if self.held:
                return await wait(registrar, HOURS, generation)
            loop.call_soon(pass_time, delay)
            return await wait(registrar, delay, generation)

        monkeypatch.setattr(Registrar, "_wait_to_retry", noted)
        for module in (registration, kubelet_socket):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: loop.time()))


def doubling(most: float, count: int) -> list[float]:
    """The first delays between tries."""
    return [min(0.001 * 2**n, most) for n in range(count)]


async def noticed_to_die(node: SimulatedKubelet, agent: Agent) -> None:
    """The kubelet has not been led to forget us: it notices that our connection breaks (A2)."""
    seen: list[Change] = []
    unsubscribe = node.subscribe(seen.append)
    agent.break_connections()
    await until(lambda: {c.resource for c in seen if c.kind is Kind.DISCONNECTED} == set(agent.plugins))
    unsubscribe()


# --- coming together ---


async def test_it_registers_with_a_kubelet_that_is_there(node: SimulatedKubelet) -> None:
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        assert node.registrations[TOY] == 1


async def test_it_registers_when_the_kubelet_comes_later(node: SimulatedKubelet) -> None:
    async with running(node) as agent:
        await until(lambda: agent.socket.is_socket())
        await node.start()
        await stays_well(node, agent)
        assert node.registrations[TOY] == 1


async def test_a_socket_that_does_not_listen_yet_is_tried_again_from_a_millisecond_on_and_not_complained_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = Tries(monkeypatch)
    monkeypatch.setattr(registration, "time", SimpleNamespace(monotonic=lambda: 1.0))  # it is a moment, however busy

    async def tried() -> None:
        await until(lambda: len(tries.delays[TOY]) >= 4)

    node = SimulatedKubelet(tmp_path, before_listening=tried)
    node.plugin_dir.mkdir()
    async with running(node) as agent:
        with capture_logs() as lines:
            await node.start()
            await stays_well(node, agent)
        assert tries.delays[TOY] == doubling(1.0, len(tries.delays[TOY]))
        tries.held = True
        assert node.registrations[TOY] == 1
        assert not [line for line in lines if line["log_level"] == "warning"]


async def test_a_socket_that_nobody_ever_listens_on_is_said_once_and_tried_every_second(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = Tries(monkeypatch)
    names = [f"example.com/toy{n}" for n in range(5)]
    with socket.socket(socket.AF_UNIX) as dead, capture_logs() as lines:
        dead.bind(str(node.socket))
        async with running(node, *names):
            await until(lambda: all(len(tries.delays[name]) > 13 for name in names))
            tries.held = True
        assert [line["event"] for line in lines if line["log_level"] != "info"] == ["kubelet-silent"]
        assert all(tries.delays[name][:13] == doubling(1.0, 13) for name in names)


async def test_a_refusal_is_said_once_and_tried_again_every_five_seconds_at_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(RegistrationBase):
        async def register(self, register_request: RegisterRequest) -> Empty:
            raise GRPCError(Status.UNKNOWN, "not today")

    tries = Tries(monkeypatch)
    server = SocketServer([Refusing()], tmp_path / "kubelet.sock")
    await server.open()
    with capture_logs() as lines:
        async with Agent(tmp_path, TOY) as agent:
            await until(lambda: len(tries.delays[TOY]) > 17)
            assert not agent.registrar.registered
    assert tries.delays[TOY][:17] == doubling(5.0, 17)
    assert [line["reason"] for line in lines if line["event"] == "not-registered"] == ["the kubelet refused: not today"]
    await server.shut_down()


async def test_a_registration_without_a_stream_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_STREAM_WITHIN", 0.0)

    class Forgetful(RegistrationBase):
        asked = 0

        async def register(self, register_request: RegisterRequest) -> Empty:
            self.asked += 1
            return Empty()

    service = Forgetful()
    server = SocketServer([service], tmp_path / "kubelet.sock")
    await server.open()
    with capture_logs() as lines:
        async with Agent(tmp_path, TOY):
            await until(lambda: service.asked >= 3)
    assert [line["reason"] for line in lines if line["event"] == "not-registered"] == [
        "the kubelet accepted example.com/toy but opened no ListAndWatch"
    ]
    await server.shut_down()


async def test_a_stream_that_has_ended_before_register_returns_is_not_waited_for(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_STREAM_WITHIN", HOURS)
    await node.start()
    original = Kubelet.register
    times = 0

    async def slow(self: Kubelet, resource: str, endpoint: str, options: PluginOptions) -> None:
        nonlocal times
        await original(self, resource, endpoint, options)
        times += 1
        if times == 1:
            agent.break_connections()
            await until(lambda: not agent.plugin.streaming)

    monkeypatch.setattr(Kubelet, "register", slow)
    async with running(node) as agent:
        await until(lambda: times > 1 and well(agent)(node))


# --- the kubelet restarts ---


@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "kill"])
@pytest.mark.parametrize("wipe", ["1.32", "1.36"])
async def test_a_restart_of_the_kubelet_is_answered_at_once(node: SimulatedKubelet, wipe: Any, kill: bool) -> None:
    await node.start()
    async with running(node, TOY, "example.com/other") as agent:
        await stays_well(node, agent)
        await node.restart(wipe, kill=kill)
        await stays_well(node, agent)
        assert node.registrations[TOY] == 2
        await noticed_to_die(node, agent)
        await stays_well(node, agent)


async def test_a_new_kubelet_that_is_seen_before_the_end_of_the_one_before_is_registered_with_once(
    node: SimulatedKubelet,
) -> None:
    """A busy loop hears of the new socket before it hears that the streams of the kubelet before have ended."""
    ends = 0

    async def ends_now(_request: RegisterRequest, _deadline: float | None) -> None:
        nonlocal ends
        before, node._standing = node._standing, []
        for process in before:
            await process.close(kill=True)
            await until(lambda: not agent.plugin.streaming)
            ends += 1

    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        await node.stand_still()
        node.gate = ends_now
        await node.start()
        await stays_well(node, agent)
        assert (ends, node.registrations[TOY]) == (1, 2)


@pytest.mark.parametrize("kill", [False, True], ids=["SIGTERM", "kill"])
async def test_a_kubelet_that_stays_away_for_a_while_is_found_again_at_once(
    node: SimulatedKubelet, kill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = [0.0]
    wait = Registrar._wait_to_retry

    async def long(self: Registrar, delay: float, generation: int) -> bool:
        """After the first time, wait for longer than this test does."""
        waits.append(delay if generation != agent.kubelet.generation or not waits[-1] else HOURS)
        return await wait(self, waits[-1], generation)

    monkeypatch.setattr(Registrar, "_wait_to_retry", long)
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        await node.stop(kill=kill)
        await until(lambda: waits[-1] >= HOURS)
        assert node.socket.is_socket()
        await node.start()
        await stays_well(node, agent)
        assert node.registrations[TOY] == 2


async def test_after_restarts_at_every_step_of_a_registration_each_resource_is_on_exactly_one_stream(
    node: SimulatedKubelet,
) -> None:
    steps = [(turns, kill) for turns in range(TURNS) for kill in (False, True)]
    await node.start()
    async with running(node, *(f"example.com/toy{n}" for n in range(4))) as agent:
        for n, (turns, kill) in enumerate(steps):
            await node.restart("1.32" if n % 3 == 0 else "1.36", kill=kill)
            for _ in range(turns):
                await asyncio.sleep(0)
        await stays_well(node, agent)
        assert max(node.registrations.values()) <= len(steps) + 1
        await noticed_to_die(node, agent)
        await stays_well(node, agent)
        assert all(len(registrar._server._connections) == 1 for registrar in agent.registrars.values())


async def test_a_kubelet_that_hangs_is_left_for_a_new_one(tmp_path: Path) -> None:
    """Its Register never returns; a new socket appears in its place."""
    node = SimulatedKubelet(tmp_path)
    node.plugin_dir.mkdir()
    hanging = _Hanging()
    mute = SocketServer([hanging], node.socket)
    await mute.open()
    async with running(node, *(f"example.com/toy{n}" for n in range(20))) as agent:
        await until(lambda: hanging.asked == 16)
        await node.start()
        await stays_well(node, agent)
        assert await mute.wait_disconnected(PATIENCE)
    await mute.shut_down(0)


async def test_a_resource_that_is_retired_after_a_kubelet_hung_up_ends_alone(tmp_path: Path) -> None:
    """Its end once was all resources' end, for a moment in which every pod was refused."""
    kubelet, hanging = Kubelet(tmp_path / "kubelet.sock"), _Hanging()
    server = SocketServer([hanging], kubelet.socket)
    await server.open()
    kubelet.look()
    plugin = Plugin(TOY, nothing)
    registrar = Registrar(plugin, kubelet, tmp_path)
    scope = anyio.CancelScope()

    async def keep() -> None:
        with scope:
            await registrar.run()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep)
        for n in range(1, 4):
            await until(lambda n=n: hanging.asked == n)  # type: ignore[misc]
            server.reset_connections()
        scope.cancel()
        await until(lambda: not registrar._server.is_reachable())
        await settled()  # which would be cut off with all that are in this group
    assert scope.cancelled_caught
    assert not tasks.cancel_scope.cancel_called
    await server.shut_down(0)


class _Hanging(RegistrationBase):
    asked = 0

    async def register(self, register_request: RegisterRequest) -> Empty:
        self.asked += 1
        await asyncio.Event().wait()
        return Empty()


async def test_a_new_kubelet_is_not_asked_over_the_connection_to_the_one_before(tmp_path: Path) -> None:
    kubelet = Kubelet(tmp_path / "kubelet.sock")
    old = SocketServer([hanging := _Hanging()], kubelet.socket)
    await old.open()
    kubelet.look()
    left = asyncio.ensure_future(kubelet.register("example.com/a", "a.sock", PluginOptions()))
    await until(lambda: hanging.asked == 1)
    new = SocketServer([_Accepting()], kubelet.socket)
    await new.open()
    kubelet.look()
    async with limit():
        await kubelet.register("example.com/b", "b.sock", PluginOptions())
    left.cancel()
    await asyncio.wait([left])
    assert await old.wait_disconnected(PATIENCE)
    await old.shut_down(0)
    await new.shut_down(0)


class _Accepting(RegistrationBase):
    asked: RegisterRequest | None = None

    async def register(self, register_request: RegisterRequest) -> Empty:
        self.asked = register_request
        return Empty()


@pytest.mark.parametrize(
    "answer",
    [b"\0\0\0\0\5abc", b"\1\0\0\0\1x", b"\0\0\0\0\2\x0a\xff", b"\0\0"],
    ids=["cut", "compressed", "torn", "head"],
)
async def test_an_answer_that_makes_no_sense_is_told_in_a_sentence(tmp_path: Path, answer: bytes) -> None:
    class Babbling:
        async def babble(self, stream: Stream[Any, Any]) -> None:
            await stream.recv_message()
            await stream.send_initial_metadata()
            await stream._stream.send_data(answer)
            await stream.send_trailing_metadata(status=Status.OK)

        def __mapping__(self) -> dict[str, Handler]:
            unary = Cardinality.UNARY_UNARY
            return {"/v1beta1.Registration/Register": Handler(self.babble, unary, RegisterRequest, Empty)}

    kubelet = Kubelet(tmp_path / "kubelet.sock")
    server = SocketServer([Babbling()], kubelet.socket)
    await server.open()
    with pytest.raises(RegistrationError, match="the kubelet's answer makes no sense"):
        await kubelet.register("example.com/a", "a.sock", PluginOptions())
    await server.shut_down(0)


async def test_a_registration_says_what_the_plugin_wants_to_be_asked(tmp_path: Path) -> None:
    kubelet, accepting = Kubelet(tmp_path / "kubelet.sock"), _Accepting()
    server = SocketServer([accepting], kubelet.socket)
    await server.open()
    options = PluginOptions(preferred_allocation=True)
    await kubelet.register("example.com/a", "fairlead/a.sock", options)
    assert accepting.asked == RegisterRequest(
        "v1beta1", "fairlead/a.sock", "example.com/a", DevicePluginOptions(get_preferred_allocation_available=True)
    )
    await server.shut_down(0)


async def test_events_without_a_new_socket_are_no_restart(node: SimulatedKubelet) -> None:
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        for _ in range(2):
            agent._changed(node.socket, PathChange.CREATED)
        agent.kubelet.look()
        await stays_well(node, agent)
        assert node.registrations[TOY] == 1
        assert agent.plugin.streams == 1


async def test_a_create_event_that_comes_after_the_registration_is_no_news(node: SimulatedKubelet) -> None:
    """We were trying again just when the new kubelet began to listen."""
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        agent.deaf = True
        await node.restart()
        await until(lambda: node.registrations[TOY] == 2)
        await stays_well(node, agent)
        agent.kubelet.look()  # what the event says at last
        await stays_well(node, agent)
        assert node.registrations[TOY] == 2


async def test_a_new_socket_of_a_kubelet_that_goes_on_living_is_a_restart(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its streams stay open: only the create event tells (A6)."""
    monkeypatch.setattr(registration, "_CLOSED_WITHIN", HOURS)
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        node.socket.rename(node.plugin_dir / "aside")
        os.link(node.plugin_dir / "aside", node.socket)  # the same inode, made again
        once = 2 if node.version == "1.37" else 3  # it forgets both clients
        await until(lambda: node.registrations[TOY] == once)
        await stays_well(node, agent)
        assert agent.plugin.streams == once
        await noticed_to_die(node, agent)


# --- A2: one stream, closed before the next registration ---


async def test_a_stream_that_came_while_this_process_stood_still_has_come_in_time(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was paused; to register once more would end a stream that is well."""
    until_, within = Doorbell.until, list[float]()

    async def noted(self: Doorbell, reached: Callable[[], bool], within_: float = math.inf) -> bool:
        if within_ != registration._STREAM_WITHIN:
            return await until_(self, reached, within_)
        within.append(within_)
        waiting = asyncio.ensure_future(until_(self, lambda: came and reached(), within_))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(come)
        pass_time(within_)
        return await waiting

    came = False

    def come() -> None:
        nonlocal came
        came = True
        agent.plugin.on_call()

    monkeypatch.setattr(Doorbell, "until", noted)
    await node.start()
    with capture_logs() as lines:
        async with running(node) as agent:
            await stays_well(node, agent)
            assert node.registrations[TOY] == 1
    assert within
    assert not [line for line in lines if line["event"] == "not-registered"]


async def test_a_stream_that_ends_is_followed_by_a_registration(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_CLOSED_WITHIN", HOURS)
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        agent.plugin.end_stream()
        await until(lambda: node.registrations[TOY] == 2)
        await stays_well(node, agent)
        await noticed_to_die(node, agent)
        await stays_well(node, agent)


async def test_it_registers_only_when_the_kubelet_has_closed_the_old_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_CLOSED_WITHIN", 10 * HOURS)
    node = SimulatedKubelet(tmp_path, disconnect_delay=HOURS)
    node.plugin_dir.mkdir()
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        for n in range(2, 5):
            agent.plugin.end_stream()
            await until(lambda: node.streams(TOY) == 0)
            await settled()
            assert node.registrations[TOY] == n - 1, "the kubelet has not closed the old connection"
            pass_time(HOURS)
            await until(lambda n=n: node.registrations[TOY] == n)  # type: ignore[misc]
            await stays_well(node, agent)
        await noticed_to_die(node, agent)


async def test_a_kubelet_that_never_closes_it_had_forgotten_us_and_is_registered_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_CLOSED_WITHIN", HOURS)
    node = SimulatedKubelet(tmp_path, disconnect_delay=10 * HOURS)
    node.plugin_dir.mkdir()
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        agent.plugin.end_stream()
        await until(lambda: node.streams(TOY) == 0)
        await settled()
        assert node.registrations[TOY] == 1
        pass_time(HOURS)
        await until(lambda: node.registrations[TOY] == 2)
        await until(lambda: len(agent.server._connections) == 1)


async def test_a_kubelet_that_drops_us_again_and_again_is_not_hammered(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, delays = Tries(monkeypatch), list[float]()

    def drop() -> None:
        if agent.registrar.registered and not delays:
            if len(tries.delays[TOY]) >= 17:  # or later: a reset may break into the registration after it, too
                pass_time(registration._SETTLED_AFTER)
                delays.extend(tries.delays[TOY])
            agent.break_connections()

    await node.start()
    async with running(node) as agent:
        agent.registrar.on_change = drop
        await until(
            lambda: len(tries.delays[TOY]) > len(delays) >= 17 and well(agent)(node), "it is well", lambda: delays
        )
        tries.held = True  # the kubelet goes
    assert delays == doubling(5.0, len(delays))
    assert tries.delays[TOY][len(delays)] == 0.001, "a registration that has lasted is one that works"


async def test_a_stalled_clients_connection_is_reset_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: Version
) -> None:
    """The kubelet's process stands still; a new one comes."""
    monkeypatch.setattr(registration, "_TRAILERS_WITHIN", HOURS)
    monkeypatch.setattr(registration, "_CLOSED_WITHIN", 10 * HOURS)
    node = SimulatedKubelet(tmp_path, version=version)
    node.plugin_dir.mkdir()
    stalling = SocketServer([_Stalling(node.plugin_dir)], node.socket)
    await stalling.open()
    async with running(node) as agent:
        Lists(agent.plugin).put(*more_than_fits())
        await until(lambda: agent.plugin._sending is not None)
        await node.start()
        await until(lambda: TOY in node.resources and node.resources[TOY].capacity == len(more_than_fits()))
        await settled()
        assert agent.plugin.earlier_streams == 1, "its trailers have not left"
        pass_time(HOURS)
        await until(lambda: agent.registrar.registered and not agent.plugin.earlier_streams)
    await stalling.shut_down(0)


class _Stalling(RegistrationBase):
    """Opens the stream and reads nothing of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def register(self, register_request: RegisterRequest) -> Empty:
        from tests.kubelet.transport.test_server import RawClient

        self.client = RawClient(self._directory / register_request.endpoint)
        await self.client.ask("/v1beta1.DevicePlugin/ListAndWatch")
        return Empty()

    def __del__(self) -> None:
        if hasattr(self, "client"):
            self.client.sock.close()


# --- our own socket ---


async def test_a_socket_that_was_removed_is_made_again_before_the_next_registration(node: SimulatedKubelet) -> None:
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        agent.socket.unlink()
        agent.socket.parent.rmdir()
        await node.restart()
        await stays_well(node, agent)
        assert agent.socket.is_socket()
        await noticed_to_die(node, agent)


async def test_a_socket_that_was_removed_before_the_kubelet_came_is_made_again(node: SimulatedKubelet) -> None:
    async with running(node) as agent:
        await until(lambda: agent.socket.is_socket())
        agent.socket.unlink()
        await node.start()
        await stays_well(node, agent)


async def test_a_directory_that_cannot_be_used_is_said_once_and_tried_again(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = Tries(monkeypatch)
    (node.plugin_dir / "fairlead").write_text("a file, of all things")
    await node.start()
    with capture_logs() as lines:
        async with running(node) as agent:
            await until(lambda: len(tries.delays[TOY]) > 5)
            (node.plugin_dir / "fairlead").unlink()
            await stays_well(node, agent)
            tries.held = True
    assert sum(line["event"] == "not-registered" for line in lines) == 1


async def test_at_the_end_the_stream_ends_and_the_socket_goes(node: SimulatedKubelet) -> None:
    await node.start()
    async with Agent(node.plugin_dir, TOY) as agent:
        await stays_well(node, agent)
        assert agent.socket.is_socket()
    await until(lambda: node.streams(TOY) == 0 and node.resources[TOY].allocatable == 0)
    assert list((node.plugin_dir / "fairlead").iterdir()) == []
    await node.stop()


async def test_an_allocate_under_way_at_the_end_is_answered_before_the_stream_ends(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_ALLOCATE_PATIENCE", HOURS)
    await node.start()
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(*call: Any) -> Encoded:
        asked.set()
        await go_on.wait()
        return await nothing(*call)

    async def let_go() -> None:
        await settled()
        assert not agent.registrar.registered
        assert agent.plugin.streaming
        go_on.set()

    async with Agent(node.plugin_dir, TOY) as agent:
        agent.plugin._allocate_ids = slowly
        await stays_well(node, agent)
        admitted = asyncio.ensure_future(node.admit(Pod("pod", (Container("main", {TOY: 1}),))))
        await asked.wait()
        letting_go = asyncio.ensure_future(let_go())
    await letting_go
    assert (await admitted).phase is Phase.RUNNING
    await node.stop()


async def test_options_that_changed_are_told_by_one_more_registration_of_that_resource_alone(
    node: SimulatedKubelet,
) -> None:
    opened: list[str] = []
    short: list[Change] = []

    def note(change: Change) -> None:
        if change.kind is Kind.STREAM_OPENED:
            opened.append(change.resource)
        if change.after and change.after.allocatable < 2:
            short.append(change)

    await node.start()
    async with running(node, TOY, "example.com/other") as agent:
        await stays_well(node, agent)
        unsubscribe = node.subscribe(note)
        for prefer in (None, plainly, plainly, None):
            if agent.plugin.set_hooks(prefer, None):
                agent.registrar.renew()
                await until(lambda: not agent.registrar.registered)
            await stays_well(node, agent)
        unsubscribe()
        assert opened == [TOY] * (2 if node.version == "1.37" else 4)  # one until 1.36 forgets both clients
        assert short == [], "the kubelet has all devices at every moment"
        await noticed_to_die(node, agent)


async def test_a_kubelet_that_stands_still_sees_the_end_of_a_stream_before_the_next_registration(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, end = plugin_client._Protocol.data_received, Registrar.end_stream
    unread: list[tuple[plugin_client._Protocol, bytes]] = []
    still = asyncio.Event()
    short: list[Change] = []

    def kept(self: plugin_client._Protocol, data: bytes) -> None:
        if still.is_set():
            unread.append((self, data))
        else:
            read(self, data)

    async def ended(self: Registrar) -> bool:
        still.set()
        return await end(self)

    monkeypatch.setattr(registration, "_SEEN_BY_KUBELET", 0.0)
    monkeypatch.setattr(plugin_client._Protocol, "data_received", kept)
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)
        unsubscribe = node.subscribe(lambda it: short.append(it) if it.after and it.after.allocatable < 2 else None)
        monkeypatch.setattr(Registrar, "end_stream", ended)
        assert agent.plugin.set_hooks(plainly, None)
        agent.registrar.renew()
        if node.version == "1.36":  # one of 1.37 keeps the stream
            await still.wait()
            await settled()
            still.clear()
            for protocol, data in unread:
                read(protocol, data)
        await until(lambda: not agent.registrar.registered or agent.plugin.streams > 1)
        await stays_well(node, agent)
        unsubscribe()
        assert short == []
        monkeypatch.setattr(Registrar, "end_stream", end)
        await noticed_to_die(node, agent)


async def test_a_registration_whose_connection_the_kubelet_closes_is_made_again_at_once(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_STREAM_WITHIN", HOURS)
    watch = PluginClient.watch

    async def closed(self: PluginClient, *_: Any) -> str:
        self.close()
        monkeypatch.setattr(PluginClient, "watch", watch)
        return "the client connection is closing"

    monkeypatch.setattr(PluginClient, "watch", closed)
    await node.start()
    async with running(node) as agent:
        await stays_well(node, agent)


async def plainly(request: PreferredRequest) -> tuple[str, ...]:
    return plain(request)


async def test_an_allocate_under_way_is_answered_before_another_registration(node: SimulatedKubelet) -> None:
    await node.start()
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(*call: Any) -> Encoded:
        asked.set()
        await go_on.wait()
        return await nothing(*call)

    async with running(node) as agent:
        agent.plugin._allocate_ids = slowly
        await stays_well(node, agent)
        admitted = asyncio.ensure_future(node.admit(Pod("pod", (Container("main", {TOY: 1}),))))
        await asked.wait()
        agent.registrar.renew()
        await settled()
        assert agent.registrar.registered
        assert agent.plugin.streams == 1
        go_on.set()
        assert (await admitted).phase is Phase.RUNNING
        await until(lambda: agent.plugin.streams == 2)
        await stays_well(node, agent)


async def test_a_change_of_state_is_told(node: SimulatedKubelet) -> None:
    changes: list[bool] = []
    async with running(node) as agent:
        agent.registrar.on_change = lambda: changes.append(agent.registrar.registered)
        await node.start()
        await stays_well(node, agent)
        await node.restart()
        await stays_well(node, agent)
    assert changes[:3] == [True, False, True]


async def test_registrations_under_way_share_a_connection(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Channel] = []
    original = Channel.__init__

    def noted(self: Channel, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        original(self, *args, **kwargs)

    await node.start()
    monkeypatch.setattr(Channel, "__init__", noted)
    async with running(node, *(f"example.com/toy{n}" for n in range(40))) as agent:
        await stays_well(node, agent)
        assert sum(channel._path == str(node.socket) for channel in made) < 10
