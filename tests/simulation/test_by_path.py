"""Kubelet contract: A12; from 1.37 on the kubelet knows a plugin by its resource and socket path."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest
from grpclib.exceptions import GRPCError

from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Container, Phase, Pod, ResourceView
from agent.simulation.registration import Handler
from tests.simulation.plugin import TOY, ToyPlugin, devices, serving
from tests.wait import PATIENCE, at_once

HANDLERS: tuple[Handler, ...] = get_args(Handler)


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[Kubelet]:
    async with Kubelet(tmp_path, version="1.37") as kubelet:
        yield kubelet


async def until(kubelet: Kubelet, healthy: int) -> ResourceView:
    await kubelet.wait_for(lambda k: TOY in k.resources and k.resources[TOY].allocatable == healthy)
    return kubelet.resources[TOY]


async def ended(kubelet: Kubelet, plugin: ToyPlugin) -> None:
    """End its stream, and wait until the kubelet has dealt with that."""
    plugin.end_streams()
    assert await plugin.server.wait_disconnected(PATIENCE)


async def test_two_plugins_live_side_by_side_and_the_last_to_register_is_asked(kubelet: Kubelet) -> None:
    async with (
        serving(kubelet, devices("a"), "one.sock") as one,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a", "b"), "two.sock") as two,
    ):
        await two.register()
        await until(kubelet, 2)
        one.publish(devices("a", "b", "c"))
        await until(kubelet, 3)
        assert (await kubelet.admit(Pod("p", (Container("main", {TOY: 1}),)))).phase is Phase.RUNNING
        assert (len(one.allocations), len(two.allocations)) == (0, 1)


@pytest.mark.parametrize("earlier", [True, False], ids=["the earlier", "the later"])
async def test_when_one_of_two_ends_nothing_is_unhealthy_and_the_other_is_asked(
    kubelet: Kubelet, earlier: bool
) -> None:
    lowest: list[int] = []
    async with (
        serving(kubelet, devices("a"), "one.sock") as one,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a"), "two.sock") as two,
    ):
        kubelet.subscribe(lambda change: lowest.append(change.after.allocatable) if change.after else None)
        await two.register()
        first, last = (one, two) if earlier else (two, one)
        await ended(kubelet, first)
        assert (await kubelet.admit(Pod("p", (Container("main", {TOY: 1}),)))).phase is Phase.RUNNING
        assert len(last.allocations) == 1
        assert 0 not in lowest
        last.die()
        await until(kubelet, 0)


@pytest.mark.parametrize("handler", ["all", "first"])
async def test_a_connected_path_is_refused(tmp_path: Path, handler: Handler) -> None:
    async with Kubelet(tmp_path, version="1.37", handler=handler) as kubelet, serving(kubelet, devices("a")) as plugin:
        with pytest.raises(GRPCError, match="device plugin already connected"):
            await plugin.register()
        assert kubelet.streams(TOY) == 1


async def test_that_refusal_makes_one_forget_the_client_for_ever_while_its_stream_feeds_lists(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a")) as plugin:
        with pytest.raises(GRPCError):
            await plugin.register()
        plugin.publish(devices("a", "b"))
        await until(kubelet, 2)
        plugin.end_streams()
        await kubelet.wait_for(lambda k: k.streams(TOY) == 0)
        assert not await at_once(plugin.server.wait_disconnected())
        assert kubelet.resources[TOY].allocatable == 2, "its end goes unnoticed"
        with pytest.raises(GRPCError):
            await plugin.register()


async def test_another_one_recovers_when_the_stream_ends(tmp_path: Path) -> None:
    async with Kubelet(tmp_path, version="1.37", handler="first") as kubelet, serving(kubelet, devices("a")) as plugin:
        with pytest.raises(GRPCError):
            await plugin.register()
        plugin.end_streams()
        await until(kubelet, 0)
        await plugin.register()
        await until(kubelet, 1)


async def test_the_third_says_that_all_is_well_and_opens_no_stream(tmp_path: Path) -> None:
    async with Kubelet(tmp_path, version="1.37", handler="dedup") as kubelet, serving(kubelet, devices("a")) as plugin:
        await plugin.register()
        assert plugin.calls.count("ListAndWatch") == kubelet.streams(TOY) == 1


@pytest.mark.parametrize("handler", HANDLERS)
async def test_an_options_call_that_fails_at_a_fresh_path_changes_nothing(tmp_path: Path, handler: Handler) -> None:
    async with (
        Kubelet(tmp_path, version="1.37", handler=handler) as kubelet,
        serving(kubelet, devices("a"), "one.sock") as plugin,
        ToyPlugin(kubelet.plugin_dir, TOY, devices(), "two.sock") as other,
    ):
        other.fail_options = "on purpose"
        with pytest.raises(GRPCError):
            await other.register()
        await ended(kubelet, plugin)
        assert kubelet.resources[TOY].allocatable == 0
