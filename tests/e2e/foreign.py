"""Another plugin on the node, and a pod that it gave devices to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agent.kubelet.api.v1beta1 import AllocateResponse, ContainerAllocateResponse, DeviceSpec
from agent.simulation.model import Phase, Pod
from tests.e2e.node import Node, pod
from tests.simulation.plugin import ToyPlugin, devices, recorded
from tests.wait import limit


@asynccontextmanager
async def other_plugin(
    node: Node,
    resource: str,
    *ids: str,
    name: str = "other.sock",
    numa_node: int | None = None,
    nodes: Sequence[str] = (),
) -> AsyncIterator[ToyPlugin]:
    """Registers a resource, and offers these IDs, until the context is left; `nodes` are in each of its answers."""
    plugin = ToyPlugin(node.plugin_dir, resource, devices(*ids, numa_node=numa_node), name)

    async def give(_: Sequence[str]) -> AllocateResponse:
        return AllocateResponse(
            [ContainerAllocateResponse(devices=[DeviceSpec(f"/dev/x{n}", it, "rw") for n, it in enumerate(nodes)])]
        )

    plugin.on_allocate = give
    async with plugin:
        await plugin.register()
        await node.shows(lambda k: k.resources[resource].healthy == set(ids), resource)
        await recorded(node.plugin_dir, resource, *ids)
        yield plugin
        left = node.kubelet.streams(resource) - 1
        plugin.end_streams()
    async with limit("the other plugin's end"):
        # 1.37 goes back to ours, and keeps the other one's list (A12); until 1.36 ours may be back before anybody looks
        await node.shows(lambda k: not k.resources[resource].healthy or 0 < k.streams(resource) <= left, resource)


async def hold(node: Node, resource: str, name: str = "foreign", count: int = 1) -> tuple[Pod, str]:
    """A pod that runs with devices of the resource; the first of its IDs."""
    holder = pod(name, resource, count)
    assert (await node.admit(holder)).phase == Phase.RUNNING
    return holder, min(node.held(holder, resource=resource))
