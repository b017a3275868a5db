"""Mediated devices and zcrypt nodes in the daemon: made for a pod, gone after it, made again after a reboot."""

from __future__ import annotations

import pytest

from agent.simulation.model import Phase
from backends.cex import Cex
from backends.mdev import Mdev
from tests.backends.cex import cex_trees
from tests.backends.cex.cex_trees import ZcryptKernel
from tests.backends.mdev import mdev_trees
from tests.backends.mdev.mdev_kernel import MdevKernel
from tests.backends.trees import plant
from tests.daemon.node import Node, come_of_age, hurry, pod
from tests.daemon.test_vfio import given
from tests.wait import until

VGPU = mdev_trees.resource("nvidia.com/GRID_T4-1Q", create=True)
SET = cex_trees.resource("cex.s390.ibm.com/set", (1, 6), (1, 7), overcommit=2)


@pytest.fixture
def node(node: Node) -> Node:
    plant(node.root, mdev_trees.VFIO + mdev_trees.t4() + cex_trees.machine())
    return node


def names(node: Node, directory: str) -> list[str]:
    """Asked of one directory: the rest may be going at the moment."""
    return sorted(path.name for path in (node.root / directory).iterdir())


def zcrypt(node: Node) -> list[str]:
    return [name for name in names(node, "dev") if name.startswith("zcrypt-")]


async def test_a_vgpu_is_made_for_a_pod_and_made_again_after_a_reboot_and_removed_after_it(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    kernel = MdevKernel(node.host)
    async with node.running(VGPU, backends={"mdev": Mdev(node.host, [VGPU], kernel)}):
        await node.has(VGPU.name, healthy=16)
        status = await node.kubelet.admit(pod(resource=VGPU.name))
        assert status.phase is Phase.RUNNING, status.message
        (uuid,) = names(node, "sys/bus/mdev/devices")
        answer = given(node)
        assert [spec.host_path for spec in answer.devices] == ["/dev/vfio/vfio", "/dev/vfio/71"]
        assert answer.envs == {"MDEV_PCI_RESOURCE_NVIDIA_COM_GRID_T4-1Q": uuid}
    kernel.remove(uuid)
    async with node.running(VGPU, backends={"mdev": Mdev(node.host, [VGPU], kernel)}):
        await until(lambda: names(node, "sys/bus/mdev/devices") == [uuid])
        await node.has(VGPU.name, healthy=16)
        come_of_age(monkeypatch)
        node.kubelet.end(pod(resource=VGPU.name))
        await until(lambda: names(node, "sys/bus/mdev/devices") == [])
        await node.has(VGPU.name, healthy=16)


async def test_containers_on_one_queue_have_a_node_each_and_lose_only_their_own(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    kernel = ZcryptKernel(node.host)
    async with node.running(SET, backends={"cex": Cex(node.host, [SET], kernel)}):
        await node.has(SET.name, healthy=4)
        for name in ("one", "two", "three"):
            status = await node.kubelet.admit(pod(name, resource=SET.name))
            assert status.phase is Phase.RUNNING, status.message
        before = zcrypt(node)
        assert len(before) == 3
        refused = await node.kubelet.admit(pod("greedy", 2, SET.name))
        assert refused.phase is not Phase.RUNNING
        come_of_age(monkeypatch)
        node.kubelet.end(pod("two", resource=SET.name))
        await until(lambda: len(zcrypt(node)) == 2)
        assert set(zcrypt(node)) < set(before)
