"""Kubelet contract: A1."""

import asyncio
import socket
from pathlib import Path

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Kind
from agent.simulation.registration import is_extended_resource
from tests.simulation.manual_clock import ManualClock
from tests.simulation.plugin import TOY, ToyPlugin, devices, register
from tests.wait import pass_time, settled, until

DEADLINE = 60.0  # seconds, of which none passes but by a test


async def refusal(kubelet: Kubelet, resource: str, endpoint: str, version: str = "v1beta1") -> str:
    with pytest.raises(GRPCError) as caught:
        await register(kubelet.socket, resource, endpoint, version=version)
    assert caught.value.status is Status.UNKNOWN
    assert caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "name",
    ["example.com/toy", "a/b", "devices.kubevirt.io/vhost-net", "x-1.y/A_b.C-9", "example.com/" + "n" * 63],
)
def test_a_resource_name_is_accepted(name: str) -> None:
    assert is_extended_resource(name)


@pytest.mark.parametrize(
    "name",
    [
        "toy",
        "",
        "/toy",
        "example.com/",
        "a/b/c",
        "kubernetes.io/toy",
        "x.kubernetes.io/toy",
        "requests.example.com/toy",
        "Example.com/toy",
        "-example.com/toy",
        "example..com/toy",
        "example.com/-toy",
        "example.com/toy.",
        "example.com/toy\n",
        "example.com/" + "n" * 64,
        "d" * 245 + "/toy",
    ],
)
def test_a_resource_name_is_refused(name: str) -> None:
    assert not is_extended_resource(name)


async def test_a_wrong_version_or_name_is_refused_as_unknown_with_a_text(kubelet: Kubelet) -> None:
    assert "v1alpha" in await refusal(kubelet, TOY, "toy.sock", version="v1alpha")
    assert '"toy" is invalid' in await refusal(kubelet, "toy", "toy.sock")
    assert kubelet.resources == {}


async def test_register_dials_back_and_opens_the_stream_before_it_answers(kubelet: Kubelet) -> None:
    async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a")) as plugin:
        await plugin.register()
        assert plugin.calls[0] == "GetDevicePluginOptions"
        assert kubelet.streams(TOY) == 1
        assert kubelet.registrations[TOY] == 1
        await kubelet.wait_for(lambda k: TOY in k.resources)
        assert kubelet.resources[TOY].allocatable == 1


async def test_the_socket_may_lie_in_a_sub_directory(kubelet: Kubelet) -> None:
    (kubelet.plugin_dir / "fairlead").mkdir()
    async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a"), "fairlead/toy.sock") as plugin:
        await plugin.register()
        await kubelet.wait_for(lambda k: TOY in k.resources)


@pytest.mark.parametrize("endpoint", ["", "missing.sock", "absolute"])
async def test_an_empty_absolute_or_missing_endpoint_fails_after_the_dial_timeout(
    tmp_path: Path, endpoint: str
) -> None:
    clock = ManualClock()
    async with (
        Kubelet(tmp_path, clock=clock) as kubelet,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a")),
    ):
        if endpoint == "absolute":
            endpoint = str(kubelet.plugin_dir / "toy.sock")
        call = asyncio.create_task(refusal(kubelet, TOY, endpoint))
        await clock.awaited(10.0)
        clock.advance(9.9)
        await settled()
        assert not call.done()
        clock.advance(0.1)
        assert "failed to dial device plugin" in await call


async def test_a_socket_that_appears_while_the_kubelet_dials_is_found(tmp_path: Path) -> None:
    clock = ManualClock()
    async with Kubelet(tmp_path, clock=clock) as kubelet:
        call = asyncio.create_task(register(kubelet.socket, TOY, "toy.sock"))
        await clock.awaited(1.0)
        async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a")):
            clock.advance(1.0)
            await call
            assert kubelet.streams(TOY) == 1


async def test_a_socket_that_listens_but_does_not_serve_costs_the_dial_timeout(tmp_path: Path) -> None:
    clock = ManualClock()
    async with Kubelet(tmp_path, clock=clock) as kubelet:
        with socket.socket(socket.AF_UNIX) as mute:
            mute.bind(str(kubelet.plugin_dir / "toy.sock"))
            mute.listen()
            call = asyncio.create_task(refusal(kubelet, TOY, "toy.sock"))
            await clock.awaited(10.0)
            await settled()
            assert not call.done()
            clock.advance(10.0)
            assert "failed to dial" in await call


async def test_an_error_from_the_options_call_fails_register(kubelet: Kubelet) -> None:
    async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a")) as plugin:
        plugin.fail_options = "not yet"
        with kubelet.changes() as changes:
            assert "not yet" in await refusal(kubelet, TOY, plugin.endpoint)
            assert changes.get_nowait().kind is Kind.REFUSED
        assert kubelet.streams(TOY) == 0


async def give_up_while_it_dials(kubelet: Kubelet, clock: ManualClock) -> None:
    """Call Register with a deadline that passes when the kubelet has found nobody to dial, and tries again later."""
    call = asyncio.create_task(register(kubelet.socket, TOY, "toy.sock", timeout=DEADLINE))
    await clock.awaited(1.0)
    pass_time(DEADLINE)
    with pytest.raises((GRPCError, TimeoutError)):
        await call


async def test_from_1_36_the_callers_deadline_ends_the_dial_back(tmp_path: Path) -> None:
    clock = ManualClock()
    async with Kubelet(tmp_path, clock=clock) as kubelet:
        await give_up_while_it_dials(kubelet, clock)
        await until(lambda: clock.pending() == [])
        async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a")) as plugin:
            clock.advance(1.0)
            await settled()
            assert plugin.calls == []


async def test_before_1_36_the_dial_back_goes_on_without_the_caller(tmp_path: Path) -> None:
    clock = ManualClock()
    async with Kubelet(tmp_path, version="1.32", clock=clock) as kubelet:
        await give_up_while_it_dials(kubelet, clock)
        async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a")):
            clock.advance(1.0)
            await kubelet.wait_for(lambda k: TOY in k.resources)


async def test_one_register_means_one_connection(kubelet: Kubelet) -> None:
    async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a")) as plugin:
        await plugin.register()
        assert len(plugin.server._connections) == 1
