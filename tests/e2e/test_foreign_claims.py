"""Hardware that an earlier plugin gave to a pod is given to no other until that pod is gone."""

from __future__ import annotations

import json

import pytest

from agent.simulation.pods import Phase
from tests.e2e.foreign import hold, other_plugin
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import finish
from tests.e2e.test_claims import OFTEN_ASKING


async def asked(node: Node, *command: str) -> dict[str, object]:
    code, out, err = await finish(*command, "--json", "--config", str(node.root / "config.toml"))
    assert code == 0, err
    return json.loads(out)  # type: ignore[no-any-return]


async def test_hardware_of_an_earlier_plugins_pod_is_not_offered_until_it_ends(node: Node) -> None:
    node.mknod("w1", "w2")
    async with other_plugin(node, WIDGET, "a-0", nodes=["/dev/w1"]):
        holder, held = await hold(node, WIDGET)
    since = len(node.lists)
    async with node.agent(prelude=OFTEN_ASKING) as agent:
        await node.healthy("w2")
        assert not any("w1" in change.after.healthy for change in node.lists[since:] if change.after)
        assert node.lists_without(held, since) == []
        assert (await node.admit(pod("ours"))).phase == Phase.RUNNING
        assert (await node.admit(pod("late"))).phase == Phase.FAILED
        shown = json.dumps(await asked(node, "status"))
        assert "foreign" in shown
        explained = json.dumps(await asked(node, "explain", "w1"))
        assert "foreign" in explained
        assert "a-0" in explained
        node.kubelet.end(holder)
        agent.pass_minute()
        await node.shows(lambda k: "w1" in k.resources[WIDGET].healthy)
        await node.shows(lambda _: held not in node.listed())
    assert node.kubelet.panics == []


async def test_shared_hardware_of_an_earlier_plugins_pod_is_offered_once_less(node: Node) -> None:
    node.mknod("w1")
    async with other_plugin(node, WIDGET, "a-0", "a-1", nodes=["/dev/w1"]):
        _, held = await hold(node, WIDGET)
    async with node.agent(chardev(count=3)):
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) == 2)
        assert held in node.kubelet.resources[WIDGET].unhealthy


async def test_a_device_that_comes_later_and_is_an_earlier_plugins_pods_is_never_offered(node: Node) -> None:
    node.mknod("w2")
    async with other_plugin(node, WIDGET, "a-0", nodes=["/dev/w1"]):
        await hold(node, WIDGET)
    since = len(node.lists)
    async with node.agent(chardev(), chardev("/dev/x*", "fl.test/x")):
        await node.healthy("w2")
        node.mknod("w1", "x1")
        await node.healthy("x1", resource="fl.test/x")
        node.mknod("w3")
        await node.healthy("w2", "w3")
        assert not any("w1" in change.after.healthy for change in node.lists[since:] if change.after)


@pytest.mark.parametrize("nodes", [(), ("/dev/null",), ("/dev/w*",)], ids=["none", "unknown", "no path"])
async def test_an_answer_that_leads_to_no_device_holds_none(node: Node, nodes: tuple[str, ...]) -> None:
    node.mknod("w1")
    async with other_plugin(node, WIDGET, "a-0", nodes=nodes):
        await hold(node, WIDGET)
    async with node.agent():
        await node.healthy("w1")
