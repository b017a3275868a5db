"""Pods have devices by ResourceClaims through whatever ends: the agent killed, the kubelet restarted, the API server away."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest

from agent.simulation.clock import Clock
from agent.simulation.dra import ClaimError, ClaimKey
from tests.apiserver import ApiServer
from tests.e2e.faces.test_dra import agent, allocated, claimed, dra, offers
from tests.e2e.node import Node, chardev
from tests.e2e.process import AgentProcess, finish
from tests.wait import until

DRIVER = "fairlead.dev"


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer().running() as server:
        yield server


@pytest.fixture
async def dra_node(node: Node, server: ApiServer) -> Node:
    """One whose kubelet serves DRA, and looks for drivers often."""

    async def wipe(_driver: str | None) -> None:
        server.objects.wipe()

    node.kubelet.serves_dra, node.kubelet.wipe_slices = True, wipe
    node.kubelet._clock = Clock(100.0)
    await node.kubelet.restart()
    node.mknod("w1", "w2")
    return node


async def registered(node: Node) -> None:
    await until(lambda: node.kubelet.drivers.connected(DRIVER), "the driver is registered")


@asynccontextmanager
async def serving(node: Node, server: ApiServer, *resources: str) -> AsyncIterator[AgentProcess]:
    async with agent(node, *(resources or [claimed()]), dra(server, node)) as it:
        await registered(node)
        yield it


def given(node: Node, pod: str) -> list[str]:
    """The device nodes that a runtime makes for a pod."""
    known = {
        f"{spec['kind']}={device['name']}": device["containerEdits"]
        for spec in (json.loads(path.read_text()) for path in (node.root / "cdi").iterdir())
        for device in spec["devices"]
    }
    edits = (known[name] for name in node.kubelet.drivers.cdi_devices(pod))
    return [it["path"] for one in edits for it in one.get("deviceNodes", ())]


async def refused(node: Node, pod: str, claims: Iterable[ClaimKey]) -> str:
    with pytest.raises(ClaimError) as caught:
        await node.kubelet.drivers.admit(pod, list(claims))
    return str(caught.value)


async def told(node: Node) -> str:
    _, out, err = await finish("explain", "/dev/w1", "--config", str(node.root / "config.toml"))
    return " ".join((out + err).split())


async def test_an_agent_that_is_killed_knows_its_claims_and_the_next_one_ends_them(
    dra_node: Node, server: ApiServer
) -> None:
    node = dra_node
    claim = await allocated(server, "mine", "dev-w1")
    async with serving(node, server) as it:
        await offers(server, "dev-w1", "dev-w2")
        await node.kubelet.drivers.admit("mine", [claim])
        await it.kill()
    assert not node.kubelet.drivers.connected(DRIVER)
    assert given(node, "mine") == ["/dev/w1"], "a container that starts again is made from it"
    other = await allocated(server, "other", "dev-w1")
    async with serving(node, server):
        assert "in use: ResourceClaim default/mine has" in await refused(node, "other", [other])
        assert "default/mine (main, by ResourceClaim mine)" in await told(node)
        await node.kubelet.drivers.end("mine")
        await node.kubelet.drivers.admit("other", [other])
        assert given(node, "other") == ["/dev/w1"]


async def test_a_kubelet_that_restarts_again_and_again_finds_the_driver_and_its_slices_each_time(
    dra_node: Node, server: ApiServer
) -> None:
    node = dra_node
    async with serving(node, server):
        await node.kubelet.drivers.admit("mine", [await allocated(server, "mine", "dev-w1")])
        for n in range(5):
            await node.kubelet.restart()
            await registered(node)
            await offers(server, "dev-w1", "dev-w2")
            pod = f"pod-{n}"
            await node.kubelet.drivers.admit(pod, [await allocated(server, pod, "dev-w2")])
            assert given(node, pod) == ["/dev/w2"]
            await node.kubelet.drivers.end(pod)
        assert given(node, "mine") == ["/dev/w1"]


async def test_while_the_api_server_is_away_pods_wait_and_others_run_and_end(dra_node: Node, server: ApiServer) -> None:
    node = dra_node
    async with serving(node, server):
        await node.kubelet.drivers.admit("mine", [await allocated(server, "mine", "dev-w1")])
        waiting = await allocated(server, "waiting", "dev-w2")
        await server.stop()
        assert "ResourceClaim default/waiting cannot be read" in await refused(node, "waiting", [waiting])
        assert given(node, "mine") == ["/dev/w1"]
        await node.kubelet.drivers.end("mine")
        await server.start()
        await node.kubelet.drivers.admit("waiting", [waiting])
        assert given(node, "waiting") == ["/dev/w2"]


async def test_a_resource_that_goes_back_to_the_device_plugin_api_keeps_what_claims_have_from_its_pods(
    dra_node: Node, server: ApiServer
) -> None:
    node = dra_node
    async with serving(node, server):
        await node.kubelet.drivers.admit("mine", [await allocated(server, "mine", "dev-w1")])
        node.config(chardev(), dra(server, node), run=str(node.root))
        await node.kubelet.wait_for(lambda k: "fl.test/widget" in k.resources)
        await node.kubelet.wait_for(lambda k: k.resources["fl.test/widget"].healthy == {"w2"})
        assert node.kubelet.resources["fl.test/widget"].unhealthy == {"w1"}
        # the driver begins again meanwhile; a real kubelet asks until it is there
        await until(lambda: node.kubelet.drivers.connected(DRIVER), "the driver is registered")
        await node.kubelet.drivers.end("mine")
        await node.kubelet.wait_for(lambda k: k.resources["fl.test/widget"].healthy == {"w1", "w2"})


async def test_the_health_of_a_device_reaches_the_status_of_its_pod(dra_node: Node, server: ApiServer) -> None:
    node = dra_node
    async with serving(node, server):
        await node.kubelet.drivers.admit("mine", [await allocated(server, "mine", "dev-w1")])

        def health() -> dict[str, tuple[int, str]]:
            return {device: it for (_, _, device), it in node.kubelet.drivers.health.items()}

        await until(lambda: health().get("dev-w1") == (1, ""), seen=health)
        node.unlink("w1")
        await until(lambda: health().get("dev-w1", (0, ""))[0] == 2, seen=health)
        assert "gone" in health()["dev-w1"][1]
