"""Soft RDMA on a real kernel: it comes with its nodes, its port goes down without a word of the kernel, and it goes."""

from __future__ import annotations

import json

from tests.guest.hardware import soft_rdma
from tests.guest.node import Node

HCA = "example.com/hca"
POOL = "rdma/shared"
NODES = [f"/dev/infiniband/{name}" for name in ("issm0", "umad0", "uverbs0", "rdma_cm")]
RESOURCES = f"""
[[resource]]
name = "{HCA}"
backend = "infiniband"
select = {{ hca = "rxe0" }}
down_after = "1s"
up_after = "1s"

[[resource]]
name = "{POOL}"
backend = "infiniband"
shared = 2
down_after = "1s"
up_after = "1s"
"""


async def test_soft_rdma_comes_fails_recovers_and_goes(node: Node) -> None:
    async with node.agent(RESOURCES) as agent:
        await node.shows(HCA)
        async with soft_rdma(node.guest) as netdev:
            await node.shows(HCA, "rxe0")
            await node.told("add", SUBSYSTEM="infiniband")
            async with node.pod({HCA: 1}) as pod:
                assert pod["gets"][HCA] == {"ids": ["rxe0"], "envs": {}, "nodes": NODES}
                since = len(agent.lines)
                await node.guest.run(f"ip link set {netdev} down")
                await node.shows(HCA, unhealthy=["rxe0"])
                await agent.says(since, event="device-changed", resource=HCA, reason="port-down")
            await node.guest.run(f"ip link set {netdev} up")
            await node.shows(HCA, "rxe0")
            await agent.says(event="claims-ended")
            (found,) = next(of for of in (await node.discover())["resources"] if of["name"] == HCA)["devices"]
            told = {name: found["attributes"][name] for name in ("port", "link_layer", "state", "ifname")}
            assert told == {
                "port": ["rxe0:1"],
                "link_layer": ["Ethernet"],
                "state": ["ACTIVE"],
                "ifname": [netdev],
            }, json.dumps(found)
            await node.guest.run("rdma dev set rxe0 name mlx5_9")
            await node.shows(POOL, f"{POOL}::0", f"{POOL}::1")
            await node.guest.run("rdma dev set mlx5_9 name rxe0")
            await node.shows(POOL)
            await node.shows(HCA, "rxe0")
        await node.shows(HCA)
        await node.told("remove", SUBSYSTEM="infiniband")
