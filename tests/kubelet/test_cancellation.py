"""Whoever waits may be cut off at any time: the kubelet hangs up, a reload takes the resource away, the agent stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.discovery.paths import DirectoryWatch
from agent.kubelet.kubelet_socket import Kubelet
from agent.kubelet.lock import exclusive
from agent.kubelet.plugin import Plugin
from agent.kubelet.registration import Registrar
from agent.kubelet.server import SocketServer
from agent.kubelet.wire import PluginOptions
from agent.kubelet.witnesses import list_pods
from agent.simulation.kubelet import Kubelet as SimulatedKubelet
from tests.cancelling import cancelled_everywhere
from tests.kubelet.plugins import TOY, Lists, nothing
from tests.kubelet.test_allocation import Claiming
from tests.kubelet.test_allocation import House as Allocating
from tests.kubelet.test_prestart import House as Starting
from tests.wait import limit, until


async def test_an_allocate_gives_its_turn_back_and_leaves_the_claim_with_the_ledger() -> None:
    house = Allocating(Claiming)

    async def busy() -> None:
        async with house.turns.take({"toy:a"}):
            await asyncio.sleep(0)

    async def allocate() -> None:
        waiting = asyncio.ensure_future(busy())
        try:
            await asyncio.sleep(0)
            await house.allocator.allocate(TOY, ["a"], lambda _: True)
        finally:
            await asyncio.wait([waiting])

    async def after() -> None:
        await until(lambda: not house.turns.busy)
        assert house.listed["a"]

    assert await cancelled_everywhere(allocate, after) >= 3
    assert {held.id for held in house.recorded} == {"a"}
    house.jobs.close()


async def test_a_container_that_is_reset_for_its_start_gives_its_turn_back() -> None:
    house = Starting("reset")

    async def after() -> None:
        await until(lambda: not house.turns.busy)

    assert await cancelled_everywhere(lambda: house.starter.start(TOY, ["a"]), after) >= 1
    assert house.resets[-1] == {"toy:a"}
    house.jobs.close()


@asynccontextmanager
async def kubelet(tmp_path: Path) -> AsyncIterator[SimulatedKubelet]:
    node = SimulatedKubelet(tmp_path)
    node.plugin_dir.mkdir()
    async with node:
        yield node


async def test_a_question_to_the_kubelet_leaves_no_connection(tmp_path: Path) -> None:
    async with kubelet(tmp_path) as node:

        async def after() -> None:
            await asyncio.sleep(0)

        assert await cancelled_everywhere(lambda: list_pods(node.pod_resources_socket, 5.0), after) >= 1


async def test_a_registration_leaves_no_connection(tmp_path: Path) -> None:
    async with kubelet(tmp_path) as node:
        it = Kubelet(node.socket)

        async def register() -> None:
            plugin = Plugin(TOY, nothing)
            Lists(plugin).put("a")
            server = SocketServer([plugin], node.plugin_dir / "toy.sock")
            await server.open()
            try:
                await it.register(TOY, "toy.sock", PluginOptions())
            finally:
                plugin.end_stream()
                await server.shut_down(0.1)

        async def after() -> None:
            await until(lambda: not it._users)
            assert it._channel is None
            assert not it._turns.locked()

        assert await cancelled_everywhere(register, after) >= 2
        assert it._turns._value == Kubelet(node.socket)._turns._value


async def test_a_resource_that_is_retired_at_any_time_leaves_no_stream_and_no_socket(tmp_path: Path) -> None:
    async with kubelet(tmp_path) as node:
        it = Kubelet(node.socket)
        it.look()
        registrars: list[Registrar] = []

        async def stay() -> None:
            plugin = Plugin(TOY, nothing)
            Lists(plugin).put("a")
            registrars.append(last := Registrar(plugin, it, node.plugin_dir))
            last.on_change = lambda: plugin.end_stream() if last.registered else None  # so that it goes on
            await last.run()

        async def after() -> None:
            last = registrars[-1]
            assert not last.registered
            assert not last.plugin.streaming
            assert not last._server._connections
            assert list((node.plugin_dir / "fairlead").iterdir()) == []
            await until(lambda: node.streams(TOY) == 0)

        assert await cancelled_everywhere(stay, after, most=30) == 30


@pytest.mark.parametrize("taken", [False, True])
async def test_a_lock_that_is_given_up_is_free(tmp_path: Path, taken: bool) -> None:
    async def hold() -> None:
        async with exclusive(tmp_path / "lock", lambda _: None):
            await asyncio.sleep(0)
            if taken:
                async with exclusive(tmp_path / "lock", lambda _: None):
                    pass

    async def after() -> None:
        async with limit(), exclusive(tmp_path / "lock", lambda _: None) as held:
            assert not held.waited

    assert await cancelled_everywhere(hold, after, most=5) >= 1


async def test_a_watch_leaves_no_descriptor(tmp_path: Path) -> None:
    async def watch() -> None:
        it = DirectoryWatch(lambda *_: None, lambda: None)
        it.watch(frozenset({tmp_path}))
        await it.run()

    async def after() -> None:
        await asyncio.sleep(0)

    assert await cancelled_everywhere(watch, after, most=1) == 1
