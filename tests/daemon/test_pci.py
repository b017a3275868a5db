"""PCI error recoveries in the daemon: whichever backend has a function, and however many of them hear of it."""

from __future__ import annotations

from typing import Any

import pytest

from agent.daemon.supervisor import Agent
from backends.base import Backend, Record, Resource
from backends.gpu import Gpu
from backends.infiniband import InfiniBand
from backends.vfio import Vfio
from tests.backends.gpu import gpus
from tests.backends.infiniband.test_backend import resource as rdma_resource
from tests.backends.machines import CONTROLS, nvidia_gpu
from tests.backends.rdma_trees import adapter
from tests.backends.trees import plant
from tests.backends.vfio import vfio_node
from tests.backends.vfio.vfio_node import BUS, GPU, SOUND, gpu, sound
from tests.daemon.node import Node, hear

H100, HCA, SPARE = "0000:5e:00.0", "0000:86:00.0", "0000:af:00.0"
H100S = gpus.resource("nvidia.com/gpu", select={"address": (H100,)})
T4S = vfio_node.resource("nvidia.com/T4")
HCAS = rdma_resource("example.com/hca")
HAD = {H100: H100S, GPU: T4S, SOUND: T4S, HCA: HCAS}


@pytest.fixture
def node(node: Node) -> Node:
    plant(node.root, BUS + CONTROLS + gpu() + sound() + nvidia_gpu(H100, 0) + adapter("mlx5_0", HCA))
    return node


def recovery(address: str, step: str) -> Record:
    """An event of the PCI bus, with what that says of every function."""
    ids = {H100: ("30200", "10DE:2330"), HCA: ("20700", "15B3:1021")}
    kind, model = ids.get(address, ("30000", "10DE:1EB8"))
    properties = {"SUBSYSTEM": "pci", "ERROR_EVENT": step, "PCI_CLASS": kind, "PCI_ID": model}
    return Record("uevent", "", 1, 0.0, f"/devices/pci0000:3a/0000:3a:00.0/{address}", properties)


def made(node: Node, *resources: Resource[Any]) -> dict[str, Backend[Any]]:
    kinds: dict[str, type[Backend[Any]]] = {"gpu": Gpu, "vfio": Vfio, "infiniband": InfiniBand}
    return {resource.spec.backend: kinds[resource.spec.backend](node.host, [resource]) for resource in resources}


def latched(agent: Agent) -> list[tuple[str, str]]:
    return [(latch.signal.hardware, latch.signal.reason) for latch in agent.node.health.kept().latches]


@pytest.mark.parametrize(
    "resources", [(H100S,), (T4S,), (HCAS,), (H100S, T4S, HCAS)], ids=["gpu", "vfio", "infiniband", "all of them"]
)
async def test_whoever_has_a_function_it_is_unhealthy_until_it_has_been_recovered(
    node: Node, resources: tuple[Resource[Any], ...]
) -> None:
    async with node.running(*resources, backends=made(node, *resources)) as agent:
        for address, resource in HAD.items():
            if resource not in resources:
                continue
            for other in resources:
                await node.has(other.name, healthy=1)
            hear(agent, recovery(address, "BEGIN_RECOVERY"))
            hear(agent, recovery(address, "FAILED_RECOVERY"))
            for other in resources:
                await node.has(other.name, healthy=int(other is not resource), unhealthy=int(other is resource))
            both = [(f"pci:{address}", reason) for reason in ("pci-recovery", "pci-recovery-failed")]
            assert latched(agent) == both, "each once, however many backends were told"
            hear(agent, recovery(address, "SUCCESSFUL_RECOVERY"))
            await node.has(resource.name, healthy=1)
            assert latched(agent) == []


async def test_what_nobody_has_harms_nobody(node: Node) -> None:
    async with node.running(T4S, backends=made(node, T4S)) as agent:
        await node.has(T4S.name, healthy=1)
        hear(agent, recovery(SPARE, "FAILED_RECOVERY"))
        assert latched(agent) == [(f"pci:{SPARE}", "pci-recovery-failed")]
        hear(agent, recovery(GPU, "FAILED_RECOVERY"))
        await node.has(T4S.name, healthy=0, unhealthy=1)
        hear(agent, recovery(GPU, "SUCCESSFUL_RECOVERY"))
        await node.has(T4S.name, healthy=1)
