"""Kubelet contract: A4 and A7.1."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.kubelet.api.v1beta1 import AllocateResponse, ContainerAllocateResponse, DevicePluginOptions
from agent.simulation.device_manager import KubeletPanicError
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Container, Phase, Pod, State
from agent.simulation.pod_workers import KubeletStoppedError
from tests.simulation.manual_clock import ManualClock
from tests.simulation.plugin import TOY, ToyPlugin, devices, serve, serving
from tests.wait import settled

IDS = [f"d{n}" for n in range(8)]


def pod(name: str, count: int = 1, init: tuple[Container, ...] = ()) -> Pod:
    return Pod(name, (Container("main", {TOY: count}),), init)


async def test_a_container_gets_its_devices_in_one_call_and_in_random_order(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices(*IDS)) as plugin:
        for n in range(4):
            assert (await kubelet.admit(pod(f"p{n}", 8))).phase is Phase.RUNNING
            kubelet.end(pod(f"p{n}", 8))
        assert [sorted(ids) for ids in plugin.allocations] == [IDS] * 4
        assert len({tuple(ids) for ids in plugin.allocations} | {tuple(IDS)}) > 2
        assert plugin.preferences == [], "nothing was announced"


async def test_devices_in_use_are_not_given_twice_and_are_free_again_after_the_pods_end(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a", "b")) as plugin:
        await kubelet.admit(pod("one"))
        await kubelet.admit(pod("two"))
        assert {i for ids in plugin.allocations for i in ids} == {"a", "b"}
        refused = await kubelet.admit(pod("three"))
        assert refused.phase is Phase.FAILED
        assert f"requested number of devices unavailable for {TOY}. Requested: 1, Available: 0" in refused.message
        kubelet.end(pod("one"))
        assert (await kubelet.admit(pod("four"))).phase is Phase.RUNNING


async def test_a_plugins_error_is_terminal_and_its_message_reaches_the_owner_verbatim(kubelet: Kubelet) -> None:
    async def refuse(ids: Sequence[str]) -> AllocateResponse:
        raise GRPCError(Status.FAILED_PRECONDITION, f"Device {ids[0]} is not there; try “another”.")

    async with serving(kubelet, devices("a")) as plugin:
        plugin.on_allocate = refuse
        status = await kubelet.admit(pod("p"))
        assert (status.phase, status.reason) == (Phase.FAILED, "UnexpectedAdmissionError")
        assert status.message == (
            "Allocate failed due to rpc error: code = FailedPrecondition desc = "
            "Device a is not there; try “another”., which is unexpected"
        )
        plugin.on_allocate = None
        assert (await kubelet.admit(pod("q"))).phase is Phase.RUNNING, "what the failed pod had is free"


async def test_a_reply_without_a_container_fails_admission(kubelet: Kubelet) -> None:
    async def nothing(ids: Sequence[str]) -> AllocateResponse:
        return AllocateResponse([])

    async with serving(kubelet, devices("a")) as plugin:
        plugin.on_allocate = nothing
        assert "no containers return" in (await kubelet.admit(pod("p"))).message


async def test_unknown_and_unhealthy_resources_fail_admission(kubelet: Kubelet) -> None:
    assert "cannot allocate unregistered device" in (await kubelet.admit(pod("p"))).message
    async with ToyPlugin(kubelet.plugin_dir, TOY, devices(unhealthy=["a"])) as plugin:
        await plugin.register()
        await kubelet.wait_for(lambda k: TOY in k.resources)
        assert "no healthy devices present" in (await kubelet.admit(pod("q"))).message
        assert plugin.allocations == []


async def test_init_containers_leave_their_devices_to_the_app_which_is_allocated_again(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices(*IDS)) as plugin:
        await kubelet.admit(pod("p", 3, init=(Container("prepare", {TOY: 2}),)))
        first, second = plugin.allocations
        assert len(first) == 2
        assert set(first) < set(second)
        assert len(second) == 3


async def test_a_sidecar_keeps_its_devices(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a", "b")) as plugin:
        await kubelet.admit(pod("p", 1, init=(Container("proxy", {TOY: 1}, sidecar=True),)))
        assert {i for ids in plugin.allocations for i in ids} == {"a", "b"}


async def test_a_long_init_container_holds_its_devices_until_it_is_finished(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a", "b")):
        long = Pod("p", (Container("main"),), init=(Container("flash", {TOY: 2}, long=True),))
        status = await kubelet.admit(long)
        assert (status.phase, status.containers["flash"].state) == (Phase.PENDING, State.RUNNING)
        assert kubelet.held(long, "flash") == {TOY: {"a", "b"}}
        await kubelet.finish_init(long)
        assert (status.phase, status.containers["flash"].state) == (Phase.RUNNING, State.TERMINATED)


async def test_a_preference_is_asked_with_free_and_chosen_devices_and_followed(kubelet: Kubelet) -> None:
    async with serving(
        kubelet, devices(*IDS, unhealthy=["bad"]), options=DevicePluginOptions(get_preferred_allocation_available=True)
    ) as plugin:
        plugin.prefer = lambda available, must, size: [*must, *sorted(set(available) - set(must))][:size]
        await kubelet.admit(pod("p", 2))
        assert sorted(plugin.allocations[-1]) == ["d0", "d1"]
        await kubelet.admit(pod("q", 3, init=(Container("prepare", {TOY: 1}),)))
        (_, _, first), (available, must, size) = plugin.preferences[1:]
        assert first == 1
        assert (sorted(available), must, size) == (IDS[2:], ["d2"], 3)
        assert sorted(plugin.allocations[-1]) == ["d2", "d3", "d4"]


async def test_a_preference_may_be_nonsense_and_the_rest_is_filled_up(kubelet: Kubelet) -> None:
    async with serving(
        kubelet, devices(*IDS), options=DevicePluginOptions(get_preferred_allocation_available=True)
    ) as plugin:
        plugin.prefer = lambda available, must, size: ["d7", "not-there"]
        await kubelet.admit(pod("p", 2))
        assert "d7" in plugin.allocations[0]
        assert len(plugin.allocations[0]) == 2


async def test_an_error_from_the_preference_fails_admission(kubelet: Kubelet) -> None:
    async with serving(
        kubelet, devices(*IDS), options=DevicePluginOptions(get_preferred_allocation_available=True)
    ) as plugin:
        status = await kubelet.admit(pod("p"))
        assert status.phase is Phase.FAILED
        assert "GetPreferredAllocation rpc failed" in status.message
        assert plugin.allocations == []


async def test_pre_start_comes_before_every_start_of_a_container(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a", "b"), options=DevicePluginOptions(pre_start_required=True)) as plugin:
        both = pod("p", 2, init=(Container("prepare", {TOY: 1}),))
        status = await kubelet.admit(both)
        await kubelet.restart_container(both, "main")
        assert [len(ids) for ids in plugin.pre_starts] == [1, 2, 2]
        assert status.containers["main"].starts == 2


async def test_without_pre_start_a_container_restarts_on_an_unhealthy_device_unasked(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a")) as plugin:
        status = await kubelet.admit(pod("p"))
        plugin.publish(devices(unhealthy=["a"]))
        await kubelet.wait_for(lambda k: k.resources[TOY].allocatable == 0)
        await kubelet.restart_container(pod("p"), "main")
        assert (status.containers["main"].state, status.containers["main"].starts) == (State.RUNNING, 2)
        assert len(plugin.allocations) == 1


async def test_a_pre_start_error_is_a_config_error_and_is_tried_again(tmp_path: Path) -> None:
    clock = ManualClock()

    async def refuse(ids: Sequence[str]) -> None:
        raise GRPCError(Status.INTERNAL, "the reset failed")

    async with (
        Kubelet(tmp_path, clock=clock) as kubelet,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a")) as plugin,
    ):
        plugin.options = DevicePluginOptions(pre_start_required=True)
        plugin.on_pre_start = refuse
        await serve(kubelet, plugin)
        status = await kubelet.admit(pod("p"))
        main = status.containers["main"]
        assert (status.phase, main.state, main.reason) == (Phase.PENDING, State.WAITING, "CreateContainerConfigError")
        assert "the reset failed" in main.message
        plugin.on_pre_start = None
        await clock.awaited(10.0)
        clock.advance(10.0)
        await kubelet.wait_for(lambda k: status.phase is Phase.RUNNING)
        assert len(plugin.allocations) == 1


async def test_pre_start_has_a_deadline_of_thirty_seconds(tmp_path: Path) -> None:
    clock = ManualClock()
    asked = asyncio.Event()

    async def hang(ids: Sequence[str]) -> None:
        asked.set()
        await asyncio.Event().wait()

    async with (
        Kubelet(tmp_path, clock=clock) as kubelet,
        ToyPlugin(kubelet.plugin_dir, TOY, devices("a")) as plugin,
    ):
        plugin.options = DevicePluginOptions(pre_start_required=True)
        plugin.on_pre_start = hang
        await serve(kubelet, plugin)
        admission = asyncio.create_task(kubelet.admit(pod("p")))
        await asked.wait()
        clock.advance(29.0)
        await settled()
        assert not admission.done()
        clock.advance(1.0)
        assert "DeadlineExceeded" in (await admission).containers["main"].message


async def test_a_slow_allocate_delays_unrelated_pods(kubelet: Kubelet) -> None:
    go = asyncio.Event()

    async def slow(ids: Sequence[str]) -> AllocateResponse:
        await go.wait()
        return AllocateResponse([ContainerAllocateResponse()])

    async with serving(kubelet, devices("a")) as plugin:
        plugin.on_allocate = slow
        first = asyncio.create_task(kubelet.admit(pod("p")))
        other = asyncio.create_task(kubelet.admit(Pod("other", (Container("main"),))))
        await settled()
        assert not other.done()
        go.set()
        assert (await first).phase is (await other).phase is Phase.RUNNING


@pytest.mark.parametrize("returns", [False, True])
async def test_an_id_that_leaves_the_list_during_its_allocate_is_a_panic_even_if_it_returns(
    kubelet: Kubelet, returns: bool
) -> None:
    async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a", "b")) as plugin:

        async def vanish(ids: Sequence[str]) -> AllocateResponse:
            plugin.publish(devices())
            await kubelet.wait_for(lambda k: k.resources[TOY].capacity == 0)
            if returns:
                plugin.publish(devices("a", "b"))
                await kubelet.wait_for(lambda k: k.resources[TOY].capacity == 2)
            return AllocateResponse([ContainerAllocateResponse()])

        await serve(kubelet, plugin)
        plugin.on_allocate = vanish
        with pytest.raises(KubeletPanicError, match="while its Allocate was in flight"):
            await kubelet.admit(pod("p"))
        assert len(kubelet.panics) == 1


async def test_an_id_that_turns_unhealthy_during_its_allocate_is_no_panic(kubelet: Kubelet) -> None:
    async with ToyPlugin(kubelet.plugin_dir, TOY, devices("a")) as plugin:

        async def sicken(ids: Sequence[str]) -> AllocateResponse:
            plugin.publish(devices(unhealthy=["a"]))
            await kubelet.wait_for(lambda k: k.resources[TOY].allocatable == 0)
            return AllocateResponse([ContainerAllocateResponse()])

        await serve(kubelet, plugin)
        plugin.on_allocate = sicken
        assert (await kubelet.admit(pod("p"))).phase is Phase.RUNNING
        assert kubelet.panics == []


async def test_a_kubelet_that_ends_during_admission_leaves_the_pod_to_be_admitted_again(kubelet: Kubelet) -> None:
    asked = asyncio.Event()

    async def hang(ids: Sequence[str]) -> AllocateResponse:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with serving(kubelet, devices("a"), "toy.sock") as plugin:
        plugin.on_allocate = hang
        admission = asyncio.create_task(kubelet.admit(pod("p")))
        await asked.wait()
        await kubelet.stop(kill=True)
        with pytest.raises(KubeletStoppedError):
            await admission
        assert kubelet.pods == {}
        with pytest.raises(KubeletStoppedError):
            await kubelet.admit(pod("p"))


async def test_two_pods_of_one_name_cannot_run(kubelet: Kubelet) -> None:
    await kubelet.admit(Pod("p", (Container("main"),)))
    with pytest.raises(ValueError, match="default/p is running already"):
        await kubelet.admit(Pod("p", (Container("main"),)))
