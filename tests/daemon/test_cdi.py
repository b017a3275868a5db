"""CDI in the daemon: specifications follow what is plugged in, pods get names, and what stays when the daemon goes."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agent.config import Difference
from agent.console.views import Gift, GivenNode
from agent.daemon.reload import Change
from agent.discovery.backend_answers import make_backends
from agent.kubelet import lock
from agent.simulation.model import Phase
from backends.base import Resource, ResourceSpec
from backends.chardev import CharDevOptions, PathOption
from tests.cdi.runtime import container, specs
from tests.daemon.node import NEVER, Node, come_of_age, hurry, pod, put_in_force
from tests.nodes import make_node
from tests.wait import settled, until

PORT = "example.com/port"
PORTS = Resource(
    PORT, ResourceSpec("chardev", CharDevOptions([PathOption("/dev/ttyUSB*", permissions="rw")]), edits="cdi")
)
FILE = "run/cdi/fairlead_example.com_port.json"


def known(node: Node) -> set[str]:
    return {device["name"] for data in specs(node.root) for device in json.loads(data)["devices"]}


async def test_specifications_follow_what_is_plugged_in_and_outlive_the_daemon_as_pods_do(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    async with node.running(PORTS) as agent:
        make_node(node.root / "dev/ttyUSB0", "c", 188, 0)
        await node.has(PORT, healthy=1)
        await until(lambda: known(node) == {"ttyUSB0"})
        gift = (await agent.control.explain("ttyUSB0")).gift
        assert gift is not None
        assert gift == Gift(
            devices=(GivenNode("/dev/ttyUSB0", "/dev/ttyUSB0", "rw"),),
            annotations=gift.annotations,
            cdi_devices=("fairlead.example.com/port=ttyUSB0",),
            cdi_spec="/run/cdi/fairlead_example.com_port.json",
        )
        assert [*gift.annotations.values()] == ["fairlead.example.com/port=ttyUSB0"]
        status = await node.kubelet.admit(pod(resource=PORT))
        assert status.phase is Phase.RUNNING, status.message
        make_node(node.root / "dev/ttyUSB1", "c", 188, 1)
        (node.root / "dev/ttyUSB0").unlink()
        await node.has(PORT, healthy=1, unhealthy=1)
        await until(lambda: known(node) == {"ttyUSB0", "ttyUSB1"})
        assert container(specs(node.root), gift.cdi_devices)[0] == {"/dev/ttyUSB0": ("/dev/ttyUSB0", "rw")}
    assert known(node) == {"ttyUSB0", "ttyUSB1"}
    other = replace(PORTS, name="example.com/other")
    async with node.running(other):  # the pod has what is configured no more
        await node.has(PORT, healthy=0, unhealthy=1)
        await until(lambda: (node.root / "run/cdi/fairlead_example.com_other.json").exists())
        assert (node.root / FILE).exists()
        come_of_age(monkeypatch)
        node.kubelet.end(pod(resource=PORT))
        await until(lambda: not (node.root / FILE).exists())
    assert known(node) == {"ttyUSB1"}


async def test_a_resource_that_a_reload_has_handed_out_by_name_is_specified_though_its_list_is_the_same(
    node: Node,
) -> None:
    make_node(node.root / "dev/ttyUSB0", "c", 188, 0)
    async with node.running(replace(PORTS, spec=replace(PORTS.spec, edits="inline"))) as agent:
        await node.has(PORT, healthy=1)
        difference = Difference(node.config(PORTS), changed=(PORT,), kinds=frozenset({"chardev"}))
        await put_in_force(agent, Change(difference, make_backends(node.host, [PORTS])))
        await until(lambda: known(node) == {"ttyUSB0"})


async def test_an_agent_that_waits_for_another_writes_and_removes_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_RETRY", NEVER)
    make_node(node.root / "dev/ttyUSB0", "c", 188, 0)
    async with node.running(PORTS):
        await until(lambda: known(node) == {"ttyUSB0"})
        with capture_logs() as lines:
            async with node.running(replace(PORTS, name="example.com/other")):
                await until(lambda: any(line["event"] == "another-agent-runs" for line in lines))
                await settled()
                files = {path.name for path in (node.root / "run/cdi").iterdir()}
    assert files == {"fairlead_example.com_port.json"}
