"""Kubelet contract: A2; a resource that the kubelet has lost is registered once more, and no other is."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from agent.kubelet import rivals
from agent.kubelet.kubelet_socket import Kubelet
from agent.kubelet.plugin import Plugin
from agent.kubelet.rivals import INTERVAL, SETTLED, LostResources, Observation
from agent.kubelet.server import SocketServer
from agent.kubelet.witnesses import FILE_NAME, PodResourcesError
from agent.simulation.kubelet import Kubelet as SimulatedKubelet
from agent.simulation.model import Version
from tests.background import running as background
from tests.kubelet.plugins import TOY, Lists, nothing, served
from tests.kubelet.test_registration import Agent, noticed_to_die, running, stays_well, version, well
from tests.simulation.plugin import recorded
from tests.wait import at_once, pass_time, settled, until

__all__ = ["version"]

OTHER = "example.com/other"


@pytest.fixture
async def node(tmp_path: Path, version: Version) -> AsyncIterator[SimulatedKubelet]:
    (tmp_path / "device-plugins").mkdir()
    kubelet = SimulatedKubelet(tmp_path, version=version)
    await kubelet.start()
    yield kubelet
    await kubelet.stop()


class Clock:
    """Stands still, so long after the last list was sent, but for what a test lets pass."""

    def __init__(self, agent: Agent) -> None:
        self.start = max(plugin.sent_at for plugin in agent.plugins.values())
        self.now = self.start + SETTLED

    def __call__(self) -> float:
        return self.now


def looking(agent: Agent, node: SimulatedKubelet, clock: Clock) -> LostResources:
    return LostResources(node.pod_resources_socket, node.plugin_dir, agent.registrars, clock)


@asynccontextmanager
async def a_look(node: SimulatedKubelet, looks: LostResources) -> AsyncIterator[None]:
    """The plugin directory is watched, and the look that another plugin's socket causes has begun."""
    looks.changed(node.plugin_dir)
    looks.changed(node.plugin_dir / "rival.sock")
    async with background(looks.run):
        await settled()
        pass_time(SETTLED)
        await settled()
        yield


@asynccontextmanager
async def rival(
    node: SimulatedKubelet, resource: str = TOY, ids: Sequence[str] = ("a", "b")
) -> AsyncIterator[SocketServer]:
    """Another plugin has registered the same name; it goes with this."""
    plugin = Plugin(resource, nothing)
    Lists(plugin).put(*ids)
    async with served(node.plugin_dir / "rival.sock", plugin) as server:
        kubelet = Kubelet(node.socket)
        kubelet.look()
        await kubelet.register(resource, "rival.sock", plugin.options)
        await recorded(node.plugin_dir, resource, *ids)
        yield server
        plugin.end_stream()
        await until(lambda: not plugin.streaming)


async def test_what_another_plugin_took_and_left_is_registered_once_more(node: SimulatedKubelet) -> None:
    async with running(node, TOY, OTHER) as agent:
        await stays_well(node, agent)
        looks = looking(agent, node, Clock(agent))
        await looks.look()
        async with rival(node):
            await looks.look()
        await until(lambda: node.streams(TOY) == 1)
        assert agent.plugins[TOY].streaming, "nothing else would tell us"
        with capture_logs() as lines:
            looks.changed(node.plugin_dir / "rival.sock")
            await looks.look()
            await until(lambda: well(agent)(node))
        await stays_well(node, agent)
        await noticed_to_die(node, agent)
        lost = [line["resource"] for line in lines if line["event"] == "registration-lost"]
        assert lost == ([] if node.version == "1.37" else [TOY]), "one of 1.37 has gone back to us by itself"
        assert agent.plugins[OTHER].streams == 1


async def test_another_plugin_that_was_killed_leaves_its_socket_and_one_of_1_37_its_list(
    node: SimulatedKubelet,
) -> None:
    async with running(node) as agent:
        await stays_well(node, agent)
        clock = Clock(agent)
        looks = looking(agent, node, clock)
        async with rival(node, ids=("theirs",)) as server:
            clock.now += SETTLED
            await looks.look()
            assert "theirs" in agent.registrar.rival
            server._made = None  # it leaves its socket
        clock.now += SETTLED
        await looks.look()
        await until(lambda: node.resources[TOY].healthy == {"a", "b"})
        await stays_well(node, agent)


async def test_another_plugin_that_is_found_out_only_after_its_end_keeps_no_name(node: SimulatedKubelet) -> None:
    """A kubelet of 1.37 that has gone back to us has its devices until our next list."""
    async with running(node) as agent:
        await stays_well(node, agent)
        clock = Clock(agent)
        clock.now = clock.start + SETTLED - 0.1
        looks = looking(agent, node, clock)
        await looks.look()
        async with rival(node, ids=("theirs",)):
            looks.changed(node.plugin_dir / "rival.sock")
            await looks.look()
        looks.changed(node.plugin_dir / "rival.sock")
        await looks.look()
        clock.now = clock.start + SETTLED + 0.1
        await looks.look()
        await until(lambda: node.resources[TOY].healthy == {"a", "b"})
        await stays_well(node, agent)


async def test_what_the_kubelet_has_is_left_alone(node: SimulatedKubelet) -> None:
    async with running(node) as agent:
        await stays_well(node, agent)
        await looking(agent, node, Clock(agent)).look()
        assert not agent.registrar._is_outdated


async def test_a_list_that_is_under_way_or_empty_and_a_resource_that_waits_prove_nothing(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def none(*_: object) -> dict[str, set[str]]:
        nonlocal asked
        asked += 1
        return {}

    monkeypatch.setattr(rivals, "list_allocatable", none)
    async with running(node) as agent:
        await stays_well(node, agent)
        clock = Clock(agent)
        looks = looking(agent, node, clock)
        clock.now = clock.start + SETTLED - 0.1
        await looks.look()
        clock.now = clock.start + SETTLED
        agent.registrar.registered = False
        await looks.look()
        agent.registrar.registered = True
        agent.plugin._sent = {}
        await looks.look()
        assert (asked, agent.registrar._is_outdated) == (0, False)


async def test_a_list_that_was_sent_while_the_kubelet_answered_proves_nothing(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(node) as agent:
        await stays_well(node, agent)
        clock = Clock(agent)
        clock.now = clock.start + INTERVAL

        async def late(*_: object) -> dict[str, set[str]]:
            agent.plugin.sent_at += 1
            return {}

        monkeypatch.setattr(rivals, "list_allocatable", late)
        await looking(agent, node, clock).look()
        assert not agent.registrar._is_outdated


async def test_a_list_that_was_sent_while_the_kubelet_answered_after_another_plugins_end_may_hide_that_the_name_is_lost(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(node) as agent:
        await stays_well(node, agent)
        clock = Clock(agent)
        clock.now = clock.start + INTERVAL

        async def late(*_: object) -> dict[str, set[str]]:
            agent.plugin.sent_at = clock.now
            return {TOY: {"a", "b"}}

        monkeypatch.setattr(rivals, "list_allocatable", late)
        looks = looking(agent, node, clock)
        looks.changed(node.plugin_dir / "rival.sock")
        await looks.look()
        assert agent.registrar._is_outdated


async def test_a_list_looks_again_where_the_last_look_was_too_early_to_tell_whose_devices_the_kubelet_has(
    node: SimulatedKubelet,
) -> None:
    async with running(node) as agent:
        await stays_well(node, agent)
        clock = Clock(agent)
        clock.now = clock.start + SETTLED - 0.1
        looks = looking(agent, node, clock)
        async with rival(node, ids=("theirs",)):
            async with a_look(node, looks):
                pass
            assert not agent.registrar.rival
            clock.now = clock.start + SETTLED
            await looks.before_list(TOY)
            assert "the kubelet has its devices: theirs" in agent.registrar.rival


@pytest.mark.parametrize("theirs", [("a",), ("c",), ("a", "b", "c")])
async def test_a_list_waits_where_the_kubelet_has_ids_of_lists_of_ours_that_it_may_not_have_from_us(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch, theirs: Sequence[str]
) -> None:
    """Another plugin may offer IDs of our lists: their pods' IDs stand in ours, and graphics cards have one UUID for all."""
    async with running(node) as agent:
        await stays_well(node, agent)
        monkeypatch.setattr("agent.kubelet.plugin.COALESCE", 0.0)
        lists = Lists(agent.plugin)
        lists.put("a", "b", "c")
        await recorded(node.plugin_dir, TOY, "a", "b", "c")
        lists.drop("c")
        await recorded(node.plugin_dir, TOY, "a", "b")
        await settled()
        clock = Clock(agent)
        clock.now = clock.start + SETTLED - 0.1
        async with rival(node, ids=theirs):
            looks = looking(agent, node, clock)
            async with a_look(node, looks):
                pass
            assert not agent.registrar.rival
            waiting = asyncio.ensure_future(looks.before_list(TOY))
            await settled()
            assert not waiting.done()
            clock.now = clock.start + SETTLED + 0.1
            await at_once(waiting)
            assert f"the kubelet has its devices: {', '.join(theirs)}" in agent.registrar.rival


@pytest.mark.parametrize("speaks", [True, False], ids=["the kubelet says what it has", "the kubelet does not say it"])
@pytest.mark.parametrize("written", [("a",), ("x", "y"), ("a", "b", "c")], ids=["older", "another's", "more"])
async def test_a_record_alone_stops_no_list(node: SimulatedKubelet, written: Sequence[str], speaks: bool) -> None:
    """It was written in the wrong order, or late, or is another resource's, or an old one that was touched."""
    async with running(node) as agent:
        await stays_well(node, agent)
        if not speaks:
            node.pod_resources_socket.unlink()
        clock = Clock(agent)
        looks = looking(agent, node, clock)
        looks.changed(node.plugin_dir)
        file, record = node.plugin_dir / FILE_NAME, {"Data": {"RegisteredDevices": {TOY: written}}, "Checksum": 0}
        for _ in "twice":
            file.write_text(json.dumps(record))
            os.utime(file, (time.time() + 60, time.time() + 60))
            await looks.look()
            looks.changed(file)
            await at_once(looks.before_list(TOY))
            clock.now += SETTLED
        assert not agent.registrar.rival
        Lists(agent.plugin).put("a", "c")
        await until(lambda: node.resources[TOY].healthy == {"a", "c"})


async def test_another_plugins_name_keeps_no_loss_from_the_kubelet(node: SimulatedKubelet) -> None:
    """Both have device `a`, and it is unplugged: no pod may get it, whichever of us the kubelet asks."""
    async with running(node) as agent:
        await stays_well(node, agent)
        clock = Clock(agent)
        looks = looking(agent, node, clock)
        lists = Lists(agent.plugin)
        lists.put("a", "b")
        async with rival(node, ids=("a", "theirs")):
            clock.now += SETTLED
            await looks.look()
            assert "theirs" in agent.registrar.rival
            lists.put("c")
            lists.drop("b")
            await settled()
            assert node.resources[TOY].healthy == {"a", "theirs"}, "it would not give them to a pod as they are ours"
            lists.drop("a")
            await until(lambda: node.resources[TOY].healthy == {"c"})


async def test_a_list_does_not_wait_where_the_kubelet_has_our_last_one(node: SimulatedKubelet) -> None:
    async with running(node) as agent:
        await stays_well(node, agent)
        clock = Clock(agent)
        clock.now = clock.start + SETTLED - 0.1
        looks = looking(agent, node, clock)
        async with a_look(node, looks):
            pass
        waiting = asyncio.ensure_future(looks.before_list(TOY))
        await settled()
        assert waiting.done()


async def test_a_list_looks_where_the_plugin_directory_is_not_watched_yet(node: SimulatedKubelet) -> None:
    async with running(node) as agent:
        await stays_well(node, agent)
        looks = looking(agent, node, Clock(agent))
        async with rival(node, ids=("theirs",)):
            await settled()
            await looks.before_list(TOY)
            assert "the kubelet has its devices: theirs" in agent.registrar.rival


async def test_a_list_does_not_go_out_beside_a_look_that_has_not_ended(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    observe = rivals.observe

    def slowly(*arguments: Any, **options: Any) -> Observation:
        over.wait()
        return observe(*arguments, **options)

    monkeypatch.setattr(rivals, "observe", slowly)
    async with running(node) as agent:
        await stays_well(node, agent)
        looks = looking(agent, node, Clock(agent))
        async with rival(node, ids=("theirs",)), a_look(node, looks):
            await looks.before_list(TOY)
            assert "the kubelet has its devices: theirs" in agent.registrar.rival
            over.set()


async def test_a_kubelet_that_does_not_say_what_it_offers_is_not_troubled(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object) -> dict[str, set[str]]:
        raise PodResourcesError("it does not serve podresources v1")

    monkeypatch.setattr(rivals, "list_allocatable", refused)
    async with running(node) as agent:
        await stays_well(node, agent)
        await looking(agent, node, Clock(agent)).look()
        assert not agent.registrar._is_outdated


async def test_what_is_lost_again_and_again_is_registered_less_and_less_often(
    node: SimulatedKubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another plugin that has the name and no device, for one; the two must not take turns every minute."""
    offered: dict[str, set[str]] = {}

    async def said(*_: object) -> dict[str, set[str]]:
        return offered

    monkeypatch.setattr(rivals, "list_allocatable", said)
    async with running(node) as agent:
        await stays_well(node, agent)
        clock = Clock(agent)
        looks, renewed = looking(agent, node, clock), list[int]()
        monkeypatch.setattr(agent.registrar, "renew", lambda: renewed.append(round(clock.now - clock.start - SETTLED)))
        for _ in range(16):
            await looks.look()
            clock.now += INTERVAL
        assert renewed == [0, 60, 180, 420, 900]
        offered = {TOY: {"a", "b"}}
        await looks.look()
        offered = {}
        clock.now += INTERVAL
        await looks.look()
        assert len(renewed) == 6, "it was well in between"
