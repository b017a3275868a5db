"""Kubernetes' own faces: what the API server is told and asked, and that nobody misses it."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator

import pytest

from agent.simulation.model import Container, Pod
from tests.apiserver import NODE, ApiServer
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import finish
from tests.wait import limit, until

IMPATIENT = """
from agent.daemon import list_reporter
from agent.kubernetes import api, own_node
list_reporter._PAUSE = own_node.TOGETHER = own_node._DRAINS_TOGETHER = 0.01
api._FIRST_PAUSE = api._LONGEST_PAUSE = 0.02
"""
"""Nothing is gathered, and whoever was refused tries again at once."""

ENVIRONMENT = {"NODE_NAME": NODE}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer().running() as server:
        yield server


def faces(server: ApiServer, node: Node, *turned_on: str) -> str:
    """The table [kubernetes]."""
    file = server.kubeconfig(node.root / "kubeconfig")
    return "[kubernetes]\n" + "".join(f"{name} = true\n" for name in turned_on) + f'kubeconfig = "{file}"\n'


async def state_of(node: Node, device: str) -> str:
    """What `explain` says of a device: `drained`, or its state."""
    _, out, _ = await finish("explain", device, "--json", "--config", str(node.root / "config.toml"))
    told = json.loads(out)
    return str(told["reason"] or told["state"])


async def is_seen(node: Node, device: str, state: str) -> None:
    seen = [""]
    async with limit(f"{device} {state}", lambda: seen[0]):
        while seen[0] != state:
            seen[0] = await state_of(node, device)


async def knows_its_holder(node: Node, name: str) -> None:
    seen = [""]
    async with limit("the holder", lambda: seen[0]):
        while name not in seen[0]:
            seen[0] = (await finish("status", "--pods", "--config", str(node.root / "config.toml")))[1]


async def test_a_device_that_fails_is_an_event_on_the_node_and_on_the_pod_that_holds_it(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1")
    table = faces(server, node, "events")
    async with node.agent(chardev(), table, prelude=IMPATIENT, environment=ENVIRONMENT):
        holder = await node.admit(Pod("trainer", (Container("main", {WIDGET: 1}),), namespace="ml"))
        await knows_its_holder(node, "trainer")
        node.unlink("w1")
        on_node, on_pod = await server.is_told("DeviceUnhealthy"), await server.is_told("DeviceUnhealthy", "Pod")
        node.mknod("w1")
        await server.is_told("DeviceHealthy", "Pod")
        again = await server.is_told("DeviceHealthy")
    assert on_node["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": NODE}
    assert (on_node["metadata"]["namespace"], on_node["type"], on_node["count"]) == ("default", "Warning", 1)
    assert on_node["message"] == f"w1 of {WIDGET} is Unhealthy (gone): the device is gone; a pod still holds it"
    assert on_pod["involvedObject"] == {
        "apiVersion": "v1", "kind": "Pod", "name": "trainer", "namespace": "ml", "uid": holder.uid,
    }  # fmt: skip
    assert (on_pod["metadata"]["namespace"], on_pod["count"]) == ("ml", 1)
    assert again["type"] == "Normal"
    assert len(server.events) == 4


async def test_what_happens_again_raises_the_count_of_the_event_that_is_there(node: Node, server: ApiServer) -> None:
    node.mknod("w1", "w2")
    table = faces(server, node, "events")
    async with node.agent(chardev(), table, prelude=IMPATIENT, environment=ENVIRONMENT):
        for count in (1, 2):
            node.unlink("w2")
            await node.healthy("w1")
            await until(lambda n=count: [it["count"] for it in server.told("DeviceGone")] == [n])  # type: ignore[misc]
            node.mknod("w2")
            await node.healthy("w1", "w2")


async def test_of_many_devices_that_go_at_once_ten_have_events_and_one_event_counts_the_others(
    node: Node, server: ApiServer
) -> None:
    names = [f"w{n}" for n in range(13)]
    node.mknod(*names)
    async with node.agent(chardev(), faces(server, node, "events"), prelude=IMPATIENT, environment=ENVIRONMENT):
        await node.healthy(*names)
        node.config(chardev("/dev/x*"), faces(server, node, "events"))
        told = await server.is_told("DevicesChanged")
        assert told["message"].startswith(f"3 more devices of {WIDGET} changed at the same moment")
        assert len(server.told("DeviceGone")) == 10


async def test_the_condition_follows_the_devices_and_keeps_the_time_of_its_last_change(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1", "w2")
    table = faces(server, node, "condition")
    earlier = "2026-01-01T00:00:00Z"
    server.node["status"]["conditions"] = [
        {"type": "FairleadDevicesHealthy", "status": "True", "lastTransitionTime": earlier}
    ]

    async def says(status: str) -> None:
        await until(lambda: server.condition().get("status") == status, status, server.condition)

    async with node.agent(chardev(), table, prelude=IMPATIENT, environment=ENVIRONMENT):
        await until(lambda: server.condition().get("reason") == "DevicesHealthy", seen=server.condition)
        assert server.condition()["lastTransitionTime"] == earlier
        node.unlink("w2")
        await says("False")
        assert server.condition()["message"] == f"0 unhealthy, 1 not offered: /dev/w2 of {WIDGET} (gone)"
        assert server.condition()["lastTransitionTime"] != earlier
        node.mknod("w2")
        await says("True")


async def test_the_nodes_annotation_drains_and_undrains_and_leaves_a_persons_drains_alone(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1", "w2", "w3")
    config = str(node.root / "config.toml")
    table = faces(server, node, "drain_annotation", "condition")
    async with node.agent(chardev(), table, prelude=IMPATIENT, environment=ENVIRONMENT) as agent:
        await finish("drain", "w3", "--reason", "mine", "--config", config)
        server.annotate("w1, /dev/w3")
        await node.healthy("w2")
        drained = await agent.says("drained", device="w1")
        assert "fairlead.dev/drain" in drained["reason"]
        await until(lambda: server.condition().get("status") == "True")  # what somebody drained is no failure
        server.annotate("w2 w3")
        await node.healthy("w1")
        await is_seen(node, "w2", "drained")
        await agent.kill()
    async with node.agent(chardev(), table, prelude=IMPATIENT, environment=ENVIRONMENT) as agent:
        await node.healthy("w1")
        server.annotate(None)
        await node.healthy("w1", "w2")
        assert await state_of(node, "w3") == "drained"


async def test_what_the_annotation_names_in_vain_is_told_and_drained_once_it_is_there(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1")
    server.annotate("w7")
    table = faces(server, node, "drain_annotation", "events")
    async with node.agent(chardev(), table, prelude=IMPATIENT, environment=ENVIRONMENT) as agent:
        told = await agent.says("kubernetes-annotation-unknown")
        assert "there is no device 'w7'" in told["reason"]
        assert (await server.is_told("DrainUnknown"))["message"] == told["reason"]
        _, out, _ = await finish("status", "--config", str(node.root / "config.toml"))
        assert "names what is no device" in out
        node.mknod("w7")
        await agent.says("drained", device="w7")
        await node.healthy("w1")


async def test_an_api_server_that_is_away_is_one_problem_and_all_else_goes_on(node: Node, server: ApiServer) -> None:
    node.mknod("w1", "w2")
    table = faces(server, node, "events", "condition", "drain_annotation")
    await server.stop()
    async with node.agent(chardev(), table, prelude=IMPATIENT, environment=ENVIRONMENT) as agent:
        away = await agent.says("kubernetes-away")
        node.unlink("w2")
        await node.healthy("w1")
        assert (await node.admit(pod())).phase
        _, out, _ = await finish("status", "--config", str(node.root / "config.toml"))
        assert out.count("Kubernetes' API server cannot be reached") == 1
        assert len(agent.said("kubernetes-away")) == 1
        await server.start()
        await agent.says("kubernetes-answers")
        await server.is_told("DeviceGone")
        await until(lambda: server.condition().get("status") == "False")
        _, out, _ = await finish("status", "--config", str(node.root / "config.toml"))
        assert "cannot be reached" not in out
    assert server.url in away["reason"]
    assert agent.said("part-restarts") == []


async def test_an_api_server_that_hangs_holds_up_neither_devices_nor_the_end(node: Node, server: ApiServer) -> None:
    node.mknod("w1", "w2")
    table = faces(server, node, "events", "condition", "drain_annotation")
    server.hangs = True
    async with node.agent(chardev(), table, prelude=IMPATIENT, environment=ENVIRONMENT) as agent:
        await until(lambda: len(server.requests) >= 2, seen=lambda: server.requests)
        node.unlink("w2")
        await node.healthy("w1")
        await until(lambda: len(server.requests) >= 3, seen=lambda: server.requests)
        agent.signal(signal.SIGTERM)
        assert await agent.ended() == 0
        assert agent.said("stopped")


async def test_a_reload_turns_the_faces_on_and_off(node: Node, server: ApiServer) -> None:
    node.mknod("w1")
    async with node.agent(chardev(), prelude=IMPATIENT, environment=ENVIRONMENT) as agent:
        node.config(chardev(), faces(server, node, "condition"))
        await agent.says("config-reloaded", settings=["kubernetes.condition", "kubernetes.kubeconfig"])
        await until(lambda: server.condition().get("status") == "True")
        node.config(chardev())
        await agent.says("config-reloaded", times=2)
        before = len(server.requests)
        node.mknod("w2")
        await node.healthy("w1", "w2")
        assert len(server.requests) == before
