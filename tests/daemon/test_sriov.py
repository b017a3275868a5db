"""SR-IOV in the daemon: virtual functions are made, given to a pod with what CNI plugins read, and taken back."""

from __future__ import annotations

import json

import pytest

from agent.simulation.model import Phase
from backends.sriov import Sriov
from tests.backends.sriov.sriov_trees import ROUTES
from tests.backends.sriov.test_creation import CARD, ActingKernel, making
from tests.backends.trees import plant
from tests.daemon.node import Node, come_of_age, hurry, pod
from tests.wait import until

NET = "intel.com/sriov_net"


@pytest.fixture
def node(node: Node) -> Node:
    plant(node.root, ROUTES + CARD.tree() + "".join(CARD.virtual_function(number) for number in range(4)))
    for number in range(4):  # as a card has them that is not divided yet
        (node.root / "sys/bus/pci/devices" / CARD.vf(number)).unlink()
    return node


class Dividing(ActingKernel):
    """Puts the functions on the bus, too."""

    def _divide(self, count: int) -> None:
        super()._divide(count)
        for number in range(count):
            at = f"sys/bus/pci/devices/{CARD.vf(number)}"
            plant(self.host.root, f"{at} -> ../../../devices/{CARD.below}/{CARD.vf(number)}")


async def test_virtual_functions_are_made_and_given_to_pods_and_cni_plugins_are_told_as_long_as_a_pod_runs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    made = making()
    told = node.root / "run/k8s.cni.cncf.io/devinfo/dp"
    async with node.running(made, backends={"sriov": Sriov(node.host, [made], Dividing(node.host))}) as agent:
        await until(lambda: (node.root / "sys/bus/pci/devices" / CARD.vf(3)).exists())
        agent.discoverers["sriov"].rescan()
        await node.has(NET, healthy=2)
        status = await node.kubelet.admit(pod(resource=NET))
        assert status.phase is Phase.RUNNING, status.message
        (file,) = told.iterdir()
        assert json.loads(file.read_text())["pci"]["pci-address"] in (CARD.vf(0), CARD.vf(1))
        come_of_age(monkeypatch)
        node.kubelet.end(pod(resource=NET))
        await until(lambda: not list(told.iterdir()))
