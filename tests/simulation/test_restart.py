"""Kubelet contract: A6 and A7.2."""

import asyncio
import base64
import json
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agent.kubelet.api.v1beta1 import ContainerAllocateResponse
from agent.kubelet.wire import Encoded
from agent.simulation import checkpoint
from agent.simulation.checkpoint import Allocation
from agent.simulation.clock import Background
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Container, Phase, Pod, ResourceView, Version
from tests.simulation.manual_clock import ManualClock
from tests.simulation.plugin import TOY, ToyPlugin, devices, register, serve, serving
from tests.wait import PATIENCE, at_once, until

POD = Pod("p", (Container("main", {TOY: 1}),))


def data(kubelet: Kubelet) -> Any:
    return json.loads((kubelet.plugin_dir / "kubelet_internal_checkpoint").read_text())["Data"]


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize(
    ("version", "left"),
    [("1.36", {"file", "sub", "kubelet_internal_checkpoint"}), ("1.32", {"sub", "kubelet_internal_checkpoint"})],
)
async def test_a_start_removes_what_its_version_removes(tmp_path: Path, version: Version, left: set[str]) -> None:
    kubelet = Kubelet(tmp_path, version=version)
    (kubelet.plugin_dir / "sub").mkdir(parents=True)
    for name in ("file", "kubelet_internal_checkpoint"):
        (kubelet.plugin_dir / name).write_text("?")
    for name in ("one.sock", "sub/two.sock"):
        bind(kubelet.plugin_dir / name)
    async with kubelet:
        assert {path.name for path in kubelet.plugin_dir.iterdir()} == left | {"kubelet.sock"}
        assert (kubelet.plugin_dir / "sub" / "two.sock").is_socket()


async def test_one_restart_may_wipe_as_another_version_does(kubelet: Kubelet) -> None:
    (kubelet.plugin_dir / "file").touch()
    await kubelet.restart()
    assert (kubelet.plugin_dir / "file").exists()
    await kubelet.restart(wipe="1.32")
    assert not (kubelet.plugin_dir / "file").exists()


async def test_the_order_is_delete_create_listen_pod_resources(tmp_path: Path) -> None:
    bound, listens = asyncio.Event(), asyncio.Event()

    async def before_listening() -> None:
        bound.set()
        await listens.wait()

    listens.set()
    async with Kubelet(tmp_path, before_listening=before_listening) as kubelet:
        bind(kubelet.plugin_dir / "old.sock")
        await kubelet.stop()
        kubelet.pod_resources_socket.unlink()
        bound.clear()
        listens.clear()
        start = asyncio.create_task(kubelet.start())
        await until(bound.is_set)
        assert not (kubelet.plugin_dir / "old.sock").exists()
        assert kubelet.socket.is_socket()
        with pytest.raises(ConnectionRefusedError):
            await register(kubelet.socket, TOY, "toy.sock")
        assert not kubelet.pod_resources_socket.exists()
        listens.set()
        await start
        assert kubelet.pod_resources_socket.is_socket()


@pytest.mark.parametrize("kill", [False, True])
async def test_a_stop_leaves_kubelet_sock_behind_and_ends_the_streams(kubelet: Kubelet, kill: bool) -> None:
    async with serving(kubelet, devices("a")) as plugin:
        await kubelet.stop(kill=kill)
        assert await plugin.server.wait_disconnected(PATIENCE)
        await until(lambda: plugin.streams == kubelet.streams(TOY) == 0)
        assert kubelet.socket.is_socket()
        with pytest.raises(ConnectionRefusedError):
            await plugin.register()


async def test_the_checkpoint_has_the_kubelets_form_and_follows_every_list(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a", unhealthy=["b"])) as plugin:
        await kubelet.wait_for(lambda k: (k.plugin_dir / checkpoint.NAME).exists())
        assert data(kubelet) == {"PodDeviceEntries": None, "RegisteredDevices": {TOY: ["a"]}}
        status = await kubelet.admit(POD)
        (entry,) = data(kubelet)["PodDeviceEntries"]
        reply = ContainerAllocateResponse().parse(base64.b64decode(entry.pop("AllocResp")))
        assert reply.envs == {"GIVEN": "a"}
        assert entry == {
            "PodUID": status.uid,
            "ContainerName": "main",
            "ResourceName": TOY,
            "DeviceIDs": {"-1": ["a"]},
        }
        plugin.publish(devices("a", "b"))
        await kubelet.wait_for(lambda k: len(data(k)["RegisteredDevices"][TOY]) == 2)


async def test_the_checkpoint_sorts_devices_by_numa_node(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a", numa_node=1)):
        await kubelet.admit(POD)
        assert data(kubelet)["PodDeviceEntries"][0]["DeviceIDs"] == {"1": ["a"]}


async def test_an_ended_pod_stays_in_the_checkpoint_until_something_else_is_written(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a", "b")):
        await kubelet.admit(POD)
        kubelet.end(POD)
        assert len(data(kubelet)["PodDeviceEntries"]) == 1
        await kubelet.admit(Pod("q", (Container("other", {TOY: 1}),)))
        assert [entry["ContainerName"] for entry in data(kubelet)["PodDeviceEntries"]] == ["other"]


def test_a_checkpoint_is_read_as_it_was_written_and_damage_is_noticed() -> None:
    entries = {("uid", "main", TOY): Allocation({0: ("a",), -1: ("b",)}, b"\x00\xff")}
    content = checkpoint.encode(entries, {TOY: ["a"]})
    assert checkpoint.decode(content) == (entries, (TOY,))
    for damaged in (b"", b"[]", content.replace(b'"a"', b'"z"')):
        with pytest.raises(checkpoint.CorruptError):
            checkpoint.decode(damaged)


async def test_a_damaged_checkpoint_is_told_and_the_kubelet_starts_with_nothing(tmp_path: Path) -> None:
    kubelet = Kubelet(tmp_path)
    kubelet.plugin_dir.mkdir()
    (kubelet.plugin_dir / checkpoint.NAME).write_text("{")
    with kubelet.changes() as changes:
        async with kubelet:
            assert "allocations are forgotten" in changes.get_nowait().text
    assert kubelet.resources == {}


async def test_allocations_survive_a_restart_and_resources_wait_for_their_plugins(tmp_path: Path) -> None:
    clock = ManualClock()
    async with Kubelet(tmp_path, clock=clock) as kubelet, serving(kubelet, devices("a", "b"), "toy.sock") as plugin:
        await kubelet.admit(POD)
        (held,) = plugin.allocations[0]
        await kubelet.restart()
        assert kubelet.resources[TOY] == ResourceView(TOY)
        assert kubelet.held(POD, "main") == {TOY: {held}}
        early = await kubelet.admit(Pod("early", (Container("main", {TOY: 1}),)))
        assert early.phase is Phase.FAILED
        assert "no healthy devices present" in early.message
        assert not plugin.server.is_reachable(), "it lay directly in the directory"
        async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a", "b")) as again:
            await serve(kubelet, again)
            await kubelet.admit(Pod("q", (Container("main", {TOY: 1}),)))
            assert again.allocations == [["b" if held == "a" else "a"]]


async def test_a_resource_that_never_returns_after_a_restart_expires(tmp_path: Path) -> None:
    clock = ManualClock()
    async with Kubelet(tmp_path, clock=clock) as kubelet, serving(kubelet, devices("a")):
        await kubelet.restart()
        clock.advance(300.0)
        assert kubelet.resources == {TOY: ResourceView(TOY)}
        assert "unregistered" in (await kubelet.admit(POD)).message


@pytest.mark.parametrize(
    ("listed", "crash"),
    [
        (devices("b", numa_node=0), True),
        (devices("b"), False),
        (devices("b", unhealthy=["a"], numa_node=0), False),
    ],
    ids=["held ID missing and NUMA known", "no NUMA node", "listed as unhealthy"],
)
async def test_a_restart_with_a_held_id_missing_crashes_where_numa_nodes_are_known(
    kubelet: Kubelet, listed: Encoded, crash: bool
) -> None:
    (kubelet.plugin_dir / "sub").mkdir()
    async with serving(kubelet, devices("a", numa_node=0), "sub/toy.sock") as plugin:
        await kubelet.admit(POD)
        plugin.publish(listed)
        await kubelet.wait_for(lambda k: "b" in k.resources[TOY].healthy)
        assert kubelet.panics == [], "without a restart nothing happens"
        await kubelet.restart()
        await serve(kubelet, plugin)
        assert bool(kubelet.panics) == crash


async def test_a_plugin_in_a_sub_directory_is_found_again_after_many_restarts(kubelet: Kubelet) -> None:
    (kubelet.plugin_dir / "sub").mkdir()
    async with serving(kubelet, devices("a"), "sub/toy.sock") as plugin:
        for n in range(20):
            await kubelet.restart(wipe="1.32" if n % 2 else "1.36", kill=n % 3 == 0)
            await serve(kubelet, plugin)
            assert kubelet.streams(TOY) == 1
    assert kubelet.registrations[TOY] == 21


async def test_starting_and_stopping_leaves_no_open_file(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with Kubelet(tmp_path):
        pass
    before = open_files()
    for _ in range(5):
        async with Kubelet(tmp_path) as kubelet, ToyPlugin(kubelet.plugin_dir, TOY, devices("a")) as plugin:
            await serve(kubelet, plugin)
    await until(lambda: open_files() == before)


async def test_it_cannot_be_started_twice(kubelet: Kubelet) -> None:
    with pytest.raises(RuntimeError, match="runs already"):
        await kubelet.start()


async def test_a_kubelet_ends_though_a_call_took_its_cancellation_for_a_lost_connection() -> None:
    """As grpclib does where both come at once."""
    background, begun = Background(), asyncio.Event()

    async def deaf_once() -> None:
        with suppress(asyncio.CancelledError):
            begun.set()
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    background.spawn(deaf_once())
    await begun.wait()
    await at_once(background.stop())
