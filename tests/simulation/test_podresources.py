"""Kubelet contract: A5."""

from pathlib import Path

import pytest
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.kubelet.api.v1 import ListPodResourcesRequest, ListPodResourcesResponse, PodResourcesListerStub
from agent.kubelet.wire import Codec
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Container, Pod
from tests.simulation.manual_clock import ManualClock
from tests.simulation.plugin import TOY, devices, serving

Held = dict[tuple[str, str], list[str]]


async def ask(kubelet: Kubelet) -> ListPodResourcesResponse:
    channel = Channel(path=str(kubelet.pod_resources_socket), codec=Codec())
    try:
        return await PodResourcesListerStub(channel).list(ListPodResourcesRequest())
    finally:
        channel.close()


async def listed(kubelet: Kubelet) -> Held:
    """(pod, container) → the IDs it holds."""
    return {
        (pod.name, container.name): [i for held in container.devices for i in held.device_ids]
        for pod in (await ask(kubelet)).pod_resources
        for container in pod.containers
    }


async def test_active_pods_are_listed_with_one_entry_for_each_id(kubelet: Kubelet) -> None:
    assert await listed(kubelet) == {}
    async with serving(kubelet, devices("a", "b")):
        pod = Pod("p", (Container("main", {TOY: 2}), Container("idle")))
        await kubelet.admit(pod)
        ((main, _),) = [(p.containers[0], p) for p in (await ask(kubelet)).pod_resources]
        assert [(d.resource_name, d.device_ids) for d in main.devices] == [(TOY, ["a"]), (TOY, ["b"])]
        assert await listed(kubelet) == {("p", "main"): ["a", "b"], ("p", "idle"): []}
        kubelet.end(pod)
        assert await listed(kubelet) == {}


async def test_ids_that_have_vanished_are_still_listed(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a")) as plugin:
        await kubelet.admit(Pod("p", (Container("main", {TOY: 1}),)))
        plugin.publish(devices())
        await kubelet.wait_for(lambda k: k.resources[TOY].capacity == 0)
        assert await listed(kubelet) == {("p", "main"): ["a"]}


async def test_ordinary_init_containers_are_left_out_and_sidecars_are_not(kubelet: Kubelet) -> None:
    async with serving(kubelet, devices("a", "b")):
        init = (Container("proxy", {TOY: 1}, sidecar=True), Container("flash", {TOY: 1}, long=True))
        await kubelet.admit(Pod("p", (Container("main"),), init=init))
        assert set(await listed(kubelet)) == {("p", "proxy"), ("p", "main")}


async def test_after_a_start_only_the_pods_known_so_far_are_listed(tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        Kubelet(tmp_path, clock=clock, pod_delay=1.0) as kubelet,
        serving(kubelet, devices("a", "b"), "toy.sock"),
    ):
        await kubelet.admit(Pod("one", (Container("main", {TOY: 1}),)))
        await kubelet.admit(Pod("two", (Container("main", {TOY: 1}),)))
        assert len(await listed(kubelet)) == 2
        await kubelet.restart()
        assert await listed(kubelet) == {}
        clock.advance(1.0)
        assert set(await listed(kubelet)) == {("one", "main")}
        clock.advance(1.0)
        held = await listed(kubelet)
        assert sorted(i for ids in held.values() for i in ids) == ["a", "b"], "asking early has freed nothing"


async def test_a_hundred_calls_a_second_and_ten_at_once_are_answered(tmp_path: Path) -> None:
    clock = ManualClock()
    async with Kubelet(tmp_path, clock=clock) as kubelet:
        for _ in range(10):
            await ask(kubelet)
        with pytest.raises(GRPCError, match="rejected by rate limit") as caught:
            await ask(kubelet)
        assert caught.value.status is Status.RESOURCE_EXHAUSTED
        clock.advance(0.02)
        await ask(kubelet)
        await ask(kubelet)
        with pytest.raises(GRPCError):
            await ask(kubelet)
