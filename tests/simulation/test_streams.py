"""Kubelet contract: A2 and A3."""

import asyncio
import random
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from grpclib.exceptions import GRPCError

from agent.kubelet.wire import device_head, device_tail, join_list, list_item
from agent.simulation import plugin_client
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Change, Container, Kind, Phase, Pod, ResourceView
from tests.simulation.manual_clock import ManualClock
from tests.simulation.plugin import TOY, ToyPlugin, devices, serving
from tests.wait import PATIENCE, at_once, pass_time, settled
from tests.wait import until as eventually

NEVER = 3600.0  # a delay that no test waits for


async def until(kubelet: Kubelet, healthy: int) -> ResourceView:
    await kubelet.wait_for(lambda k: TOY in k.resources and k.resources[TOY].allocatable == healthy)
    return kubelet.resources[TOY]


# --- A2 ---


async def test_registering_again_leaves_both_streams_feeding_state(kubelet: Kubelet) -> None:
    async with (
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a"), "old.sock") as old,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a", "b"), "new.sock") as new,
    ):
        await old.register()
        await until(kubelet, 1)
        await new.register()
        await until(kubelet, 2)
        assert kubelet.streams(TOY) == 2
        old.publish(devices("a", "b", "c"))
        await until(kubelet, 3)
        new.publish(devices())
        await until(kubelet, 0)


async def test_the_old_streams_end_disconnects_the_new_client_and_nothing_recovers_it(kubelet: Kubelet) -> None:
    async with (
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a"), "old.sock") as old,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a", "b"), "new.sock") as new,
    ):
        await old.register()
        await until(kubelet, 1)
        await new.register()
        await until(kubelet, 2)
        old.end_streams()
        assert (await until(kubelet, 0)).capacity == 2
        assert await new.server.wait_disconnected(PATIENCE)
        await kubelet.wait_for(lambda k: k.streams(TOY) == 0)
        new.publish(devices("a", "b", "c"))
        pass_time(1.0)
        await settled()
        assert kubelet.resources[TOY].allocatable == 0
        assert kubelet.streams(TOY) == 0


async def test_after_an_end_of_stream_the_kubelet_closes_that_connection(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a")) as plugin:
        plugin.end_streams()
        assert await plugin.server.wait_disconnected(PATIENCE)
        assert kubelet.resources[TOY].allocatable == 0
        await plugin.register()
        await until(kubelet, 1)
        assert kubelet.streams(TOY) == 1
        plugin.die()
        await until(kubelet, 0)


async def test_a_register_that_overtakes_the_end_of_stream_drops_the_new_client(tmp_path: Path) -> None:
    async with (
        Kubelet(tmp_path, disconnect_delay=NEVER) as kubelet,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a"), "old.sock") as old,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a", "b"), "new.sock") as new,
    ):
        await old.register()
        await until(kubelet, 1)
        old.end_streams()
        await kubelet.wait_for(lambda k: k.streams(TOY) == 0)
        await new.register()
        await until(kubelet, 2)
        assert not await at_once(old.server.wait_disconnected()), "nobody closes the old connection any more"
        new.die()
        await kubelet.wait_for(lambda k: k.streams(TOY) == 0)
        pass_time(1.0)
        await settled()
        assert kubelet.resources[TOY].allocatable == 2, "the death of the dropped client goes unnoticed"


async def test_a_register_under_way_when_the_stream_ends_overtakes_it_too(tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        Kubelet(tmp_path, clock=clock, disconnect_delay=NEVER) as kubelet,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a"), "old.sock") as old,
    ):
        await old.register()
        await until(kubelet, 1)
        new = ToyPlugin(kubelet.plugin_dir, TOY, devices("a", "b"), "new.sock")
        call = asyncio.create_task(new.register())
        await clock.awaited(1.0)
        old.end_streams()
        await until(kubelet, 0)
        async with new:
            clock.advance(1.0)
            await call
            await until(kubelet, 2)
            new.die()
            await kubelet.wait_for(lambda k: k.streams(TOY) == 0)
            assert kubelet.resources[TOY].allocatable == 2


async def test_registering_again_repairs_a_forgotten_client(tmp_path: Path) -> None:
    async with (
        Kubelet(tmp_path, disconnect_delay=NEVER) as kubelet,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a")) as plugin,
    ):
        await plugin.register()
        plugin.end_streams()
        await kubelet.wait_for(lambda k: k.streams(TOY) == 0)
        await plugin.register()  # overtakes
        plugin.end_streams()
        with kubelet.changes() as changes:
            while (await changes.get()).kind is not Kind.STREAM_ENDED:
                pass
            await plugin.register()
            seen = [changes.get_nowait().kind for _ in range(changes.qsize())]
        assert Kind.STREAM_OPENED in seen


async def test_a_failed_register_forgets_the_client_but_keeps_endpoint_and_stream(kubelet: Kubelet) -> None:
    async with (
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a", "b"), "old.sock") as old,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("x"), "new.sock") as new,
    ):
        await old.register()
        await until(kubelet, 2)
        new.fail_options = "on purpose"
        with pytest.raises(GRPCError):
            await new.register()
        old.publish(devices("a", "b", "c"))
        await until(kubelet, 3)
        pod = Pod("p", (Container("main", {TOY: 1}),))
        assert (await kubelet.admit(pod)).phase is Phase.RUNNING
        assert len(old.allocations) == 1
        old.end_streams()
        await kubelet.wait_for(lambda k: k.streams(TOY) == 0)
        assert not await at_once(old.server.wait_disconnected())
        assert kubelet.resources[TOY].allocatable == 3, "nothing is marked unhealthy"


async def test_a_hand_over_without_a_moment_of_zero(kubelet: Kubelet) -> None:
    """Fail a Register on purpose, end the old streams, register: what A2 says works."""
    async with (
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a"), "old.sock") as old,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a"), "new.sock") as new,
    ):
        await old.register()
        await until(kubelet, 1)
        lowest = []
        kubelet.subscribe(lambda change: lowest.append(change.after.allocatable) if change.after else None)
        new.fail_options = "on purpose"
        with suppress(GRPCError):
            await new.register()
        old.end_streams()
        await kubelet.wait_for(lambda k: k.streams(TOY) == 0)
        pass_time(1.0)
        await settled()
        new.fail_options = None
        await new.register()
        await kubelet.wait_for(lambda k: bool(lowest))
        assert set(lowest) == {1}
        new.die()
        await until(kubelet, 0)


async def test_the_kubelet_never_opens_a_stream_again(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a")) as plugin:
        plugin.die()
        await until(kubelet, 0)
        pass_time(1.0)
        await settled()
        assert plugin.calls.count("ListAndWatch") == 1


# --- A3 ---


async def test_every_list_is_a_full_replacement(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a", "b")) as plugin:
        plugin.publish(devices("c", unhealthy=["b"]))
        view = await until(kubelet, 1)
        assert view == ResourceView(TOY, 2, 1, frozenset({"c"}), frozenset({"b"}))


async def test_only_exactly_healthy_counts(kubelet: Kubelet) -> None:
    words = ["Healthy", "healthy", "HEALTHY", "Healthy ", "", "Unhealthy"]
    items = [list_item(device_head(f"d{n}"), b"\x12" + bytes([len(w)]) + w.encode()) for n, w in enumerate(words)]
    async with ToyPlugin(kubelet.plugin_dir, TOY, join_list(items)) as plugin:
        await plugin.register()
        view = await until(kubelet, 1)
        assert view.capacity == 6
        assert view.healthy == {"d0"}


async def test_a_duplicate_id_is_counted_twice(kubelet: Kubelet) -> None:
    async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a", "a", "b")) as plugin:
        await plugin.register()
        assert (await until(kubelet, 3)).capacity == 3


async def test_an_empty_list_gives_capacity_zero_and_stays_listed(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a")) as plugin:
        plugin.publish(devices())
        assert await until(kubelet, 0) == ResourceView(TOY)


async def test_a_list_over_4_mib_is_refused_and_the_plugin_dropped(kubelet: Kubelet) -> None:
    item = list_item(device_head("x" * 60), device_tail(True, None))
    fits, too_much = join_list([item] * (4194304 // len(item))), join_list([item] * (4194304 // len(item) + 1))
    async with ToyPlugin(kubelet.plugin_dir, TOY, fits) as plugin:
        await plugin.register()
        with kubelet.changes() as changes:
            await kubelet.wait_for(lambda k: k.resources.get(TOY, ResourceView(TOY)).capacity > 0)
            plugin.publish(too_much)
            while (change := await changes.get()).kind is not Kind.STREAM_ENDED:
                pass
        assert "ResourceExhausted" in change.text
        await until(kubelet, 0)
        assert await plugin.server.wait_disconnected(PATIENCE)
        await eventually(lambda: plugin.streams == 0)  # our stream was ended from the kubelet's side


async def test_nonsense_instead_of_a_list_ends_the_stream(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a")) as plugin:
        plugin.publish(type(devices())(b"\x0a\xff"))
        await until(kubelet, 0)


async def test_a_streams_end_keeps_capacity_and_after_five_minutes_the_node_reports_zero(tmp_path: Path) -> None:
    clock = ManualClock()
    async with Kubelet(tmp_path, clock=clock) as kubelet, serving(kubelet, devices("a", "b")) as plugin:
        plugin.end_streams()
        view = await until(kubelet, 0)
        assert view.capacity == 2
        assert view.unhealthy == {"a", "b"}
        clock.advance(299.0)
        assert kubelet.resources[TOY].capacity == 2
        clock.advance(1.0)
        assert kubelet.resources[TOY] == ResourceView(TOY)
        clock.advance(1e6)
        assert kubelet.resources == {TOY: ResourceView(TOY)}


async def test_a_plugin_that_returns_in_time_ends_the_grace_period(tmp_path: Path) -> None:
    clock = ManualClock()
    async with Kubelet(tmp_path, clock=clock) as kubelet, serving(kubelet, devices("a")) as plugin:
        plugin.end_streams()
        assert await plugin.server.wait_disconnected(PATIENCE)
        clock.advance(299.0)
        await plugin.register()
        await until(kubelet, 1)
        clock.advance(1000.0)
        assert kubelet.resources[TOY].allocatable == 1


# --- what an observer sees ---


async def test_a_change_names_the_devices_that_differ_and_when_the_message_arrived(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(kubelet, devices("a", "b", "c")) as plugin:
        monkeypatch.setattr(plugin_client, "time", SimpleNamespace(perf_counter=lambda: 7.0))
        with kubelet.changes() as changes:
            plugin.publish(devices("a", "d", unhealthy=["b"]))
            while (change := await changes.get()).kind is not Kind.LIST:
                pass
        assert change.devices() == {"d": "Healthy", "b": "Unhealthy", "c": "gone"}
        assert change.at == 7.0


async def test_waiting_in_vain_says_what_the_node_shows(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a")):
        with pytest.raises(TimeoutError, match=r"example.com/toy 1/1 \(1 streams\)"):
            await kubelet.wait_for(lambda k: False, timeout=0)


async def test_ten_thousand_devices_are_taken_in_promptly(kubelet: Kubelet) -> None:
    ids = [f"device-{n:05}" for n in range(10_000)]
    random.Random(1).shuffle(ids)
    seen: list[Change] = []
    kubelet.subscribe(seen.append)
    async with serving(kubelet, devices(*ids)) as plugin:
        plugin.publish(devices(*ids[:-1], unhealthy=ids[-1:]))
        await until(kubelet, 9_999)
    lists = [change for change in seen if change.kind is Kind.LIST]
    assert lists[1].devices() == {ids[-1]: "Unhealthy"}
