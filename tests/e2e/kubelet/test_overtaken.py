"""Kubelet contract: A9.1; another plugin registers a resource of ours and ends, and pods get our devices again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import pytest
from grpclib.client import Channel
from grpclib.exceptions import GRPCError

from agent.kubelet.api.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    DevicePluginStub,
)
from agent.kubelet.witnesses import FILE_NAME
from agent.simulation.model import Phase, Version
from tests.e2e.foreign import hold, other_plugin
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish
from tests.simulation.plugin import ToyPlugin, devices, recorded
from tests.wait import until

OTHER = "fl.test/other"
SELDOM = "from agent.kubelet import rivals\nrivals.INTERVAL = 3600.0\n"
"""Nothing is found by looking every minute: what is found is found by a sign."""


@pytest.fixture(params=["1.36", "1.37"])
def version(request: pytest.FixtureRequest) -> Version:
    version: Version = request.param
    return version


async def status(node: Node) -> dict[str, object]:
    code, out, err = await finish("status", "--json", "--config", str(node.root / "config.toml"))
    assert code == 0, err
    (resource,) = json.loads(out)["resources"]
    return resource  # type: ignore[no-any-return]


async def registered_again(node: Node, agent: AgentProcess, before: int) -> None:
    """Once the kubelet asks us, it gives our devices to pods."""
    await node.kubelet.wait_for(lambda k: k.registrations[WIDGET] > before)
    await node.registered()
    await node.shows(lambda k: bool(k.resources[WIDGET].healthy))
    assert (await node.admit(pod("later"))).phase == Phase.RUNNING


async def test_another_plugin_is_told_left_alone_and_followed(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(prelude=SELDOM) as agent:
        await node.healthy("w1")
        async with other_plugin(node, WIDGET, "theirs-0", "theirs-1", name="rival.sock"):
            said = await agent.says("overtaken", resource=WIDGET)
            assert "rival.sock" in said["reason"]
            assert "theirs-0, theirs-1" in said["reason"]
            shown = await status(node)
            assert not shown.get("registered")
            assert "rival.sock" in str(shown["complaint"])
            before, lists = node.kubelet.registrations[WIDGET], len(node.lists)
            node.mknod("w2")
            await hold(node, WIDGET, "served-by-theirs")
            await agent.takes_turns(20)
            assert (node.kubelet.registrations[WIDGET], len(node.lists)) == (before, lists), "two would take turns"
        await agent.says("registration-lost", resource=WIDGET)
        await registered_again(node, agent, before)
        await node.shows(lambda k: k.resources[WIDGET].healthy == {"w1", "w2"})
        assert not (await status(node)).get("complaint")
    assert node.kubelet.panics == []


async def test_a_device_that_comes_when_another_plugin_ends_does_not_hide_its_end(node: Node) -> None:
    """It has the same IDs, so that the kubelet's record looks as ever, and the list makes the kubelet show them healthy."""
    node.mknod("w1")
    async with node.agent(prelude=SELDOM) as agent:
        await node.healthy("w1")
        async with other_plugin(node, WIDGET, "w1", name="rival.sock"):
            before = node.kubelet.registrations[WIDGET]
            await agent.takes_turns(20)
        node.mknod("w2")
        await registered_again(node, agent, before)
    assert node.kubelet.panics == []


async def test_a_list_of_another_resource_when_another_plugin_ends_does_not_hide_its_end(node: Node) -> None:
    """The kubelet writes its record with each list: the name that was taken from us stands there with nothing then."""
    node.mknod("w1", "x1")
    patient = "from agent.kubelet import rivals\nrivals._GATHER = 2.0\n"  # the kubelet has written before anybody looks
    async with node.agent(chardev(), chardev("/dev/x*", OTHER), prelude=SELDOM + patient) as agent:
        await node.healthy("w1")
        await node.healthy("x1", resource=OTHER)
        async with other_plugin(node, WIDGET, "theirs-0", name="rival.sock"):
            await agent.says("overtaken", resource=WIDGET)
            before = node.kubelet.registrations[WIDGET]
        node.mknod("x2")
        await node.healthy("x1", "x2", resource=OTHER)
        await registered_again(node, agent, before)
    assert node.kubelet.panics == []


async def test_another_plugin_that_comes_just_after_we_did_is_told_once_that_can_be_known(node: Node) -> None:
    """Not seconds later: a list of ours until then would hide it."""
    node.mknod("w1")
    never = "from agent.kubelet import rivals\nrivals._BESIDE_OTHERS = 3600.0\n"
    async with node.agent(prelude=SELDOM + never) as agent, other_plugin(node, WIDGET, "theirs-0", name="rival.sock"):
        await agent.says("overtaken", resource=WIDGET)


async def test_no_list_goes_out_between_another_plugins_registration_and_the_next_look(node: Node) -> None:
    """The kubelet would show ours as healthy, and have nothing of the other plugin's any more that betrays it."""
    node.mknod("w1")
    blind = (
        "import anyio\nfrom agent.kubelet import rivals\nrivals.LostResources.run = lambda _: anyio.sleep_forever()\n"
    )
    async with node.agent(prelude=blind) as agent:
        await node.healthy("w1")
        async with other_plugin(node, WIDGET, "theirs-0", name="rival.sock"):
            agent.pass_minute()  # the list that the kubelet had from us is long settled
            lists = len(node.lists)
            node.mknod("w2")
            await agent.says("overtaken", resource=WIDGET)
            assert len(node.lists) == lists


@pytest.mark.parametrize("theirs", ["theirs-0", "w1"])
async def test_no_list_goes_out_while_it_cannot_be_known_yet_whether_another_plugin_came_just_after_we_did(
    node: Node, theirs: str
) -> None:
    node.mknod("w1", "w3")
    seen = "async def run(lost):\n lost._sign.set()\n await anyio.sleep_forever()\n"
    blind = (
        f"import anyio\nfrom agent.kubelet import rivals\n{seen}rivals.LostResources.run = run\nrivals.SETTLED = 30.0\n"
    )
    async with node.agent(prelude=blind) as agent:
        await node.healthy("w1", "w3")
        async with other_plugin(node, WIDGET, theirs, name="rival.sock"):
            lists = len(node.lists)
            node.mknod("w2")
            await agent.says("device-changed", device="/dev/w2")
            await agent.takes_turns(20)
            assert not agent.said("overtaken")
            agent.pass_minute()
            await agent.says("overtaken", resource=WIDGET)
            assert len(node.lists) == lists


async def test_a_list_that_waits_for_the_kubelets_record_while_the_node_stands_still_is_not_sent_without_it(
    node: Node,
) -> None:
    gate, asked = node.root / "gate", node.root / "asked"
    os.mkfifo(gate)
    slow = f"""
import anyio, os
from agent.kubelet import rivals
rivals.LostResources.run = lambda _: anyio.sleep_forever()
rivals._LIST_WAITS = 30.0
whole = rivals.record
def record(directory):
    if os.path.exists({str(gate)!r}):
        open({str(asked)!r}, "w").close()
        open({str(gate)!r}).close()
    return whole(directory)
rivals.record = record
"""
    node.mknod("w1")
    async with node.agent(prelude=slow) as agent:
        await node.healthy("w1")
        async with other_plugin(node, WIDGET, "theirs-0", name="rival.sock"):
            agent.pass_minute()
            lists = len(node.lists)
            node.mknod("w2")
            await until(asked.exists)
            agent.pass_minute()
            await agent.takes_turns(3)
            writer = os.open(gate, os.O_WRONLY)
            gate.unlink()
            os.close(writer)
            await agent.says("overtaken", resource=WIDGET)
            assert len(node.lists) == lists


async def test_a_list_that_hides_another_plugin_is_found_out_by_what_its_pods_hold(node: Node) -> None:
    """It was sent in the milliseconds in which nothing betrayed that plugin; the kubelet asks it for our devices then."""
    node.mknod("w1")
    early = "async def asked(*_): pass\nfrom agent.kubelet import rivals\nrivals.LostResources.before_list = asked\n"
    async with node.agent(prelude=SELDOM + early + "rivals.SETTLED = 3600.0\n") as agent:
        await node.healthy("w1")
        async with ToyPlugin(node.plugin_dir, WIDGET, devices("theirs-0"), "rival.sock") as other:
            other.on_allocate = nothing
            await other.register()
            await node.shows(lambda k: k.resources[WIDGET].healthy == {"theirs-0"})
            await hold(node, WIDGET, "theirs")
            node.mknod("w2")
            said = await agent.says("registration-lost", resource=WIDGET)
            assert "ours hid it" in said["reason"]
            await agent.says("registered", resource=WIDGET, times=2)
            await node.shows(lambda k: k.resources[WIDGET].healthy == {"w1", "w2"})
            asked = len(other.allocations)
            assert (await node.admit(pod("later"))).phase == Phase.RUNNING
            assert len(other.allocations) == asked, "the kubelet asks us"


async def nothing(_: Sequence[str]) -> AllocateResponse:
    return AllocateResponse([ContainerAllocateResponse()])


async def test_who_asks_for_what_we_do_not_have_is_not_the_kubelet_and_does_not_hide_another_plugin(node: Node) -> None:
    node.mknod("w1")
    often = "from agent.kubelet import rivals\nrivals._UNSETTLED = 0.01\n"
    async with node.agent(prelude=SELDOM + often) as agent:
        await node.healthy("w1")
        async with other_plugin(node, WIDGET, "theirs-0", name="rival.sock"):
            await agent.says("overtaken", resource=WIDGET)
            (socket,) = node.sockets.glob("*-fl.test_widget.sock")
            lists, channel = len(node.lists), Channel(path=str(socket))
            with pytest.raises(GRPCError, match="theirs-0"):
                await DevicePluginStub(channel).allocate(AllocateRequest([ContainerAllocateRequest(["theirs-0"])]))
            channel.close()
            node.mknod("w2")
            await agent.says("device-changed", device="/dev/w2")
            await agent.takes_turns(5)
            assert not agent.said("not-overtaken")
            assert len(node.lists) == lists


async def test_a_record_that_was_written_in_the_wrong_order_stops_no_list(node: Node) -> None:
    """The kubelet takes what it writes under a lock and writes it after: the older of two may come last."""
    node.mknod("w1", "w2")
    async with node.agent(prelude=SELDOM) as agent:
        await node.healthy("w1", "w2")
        await recorded(node.plugin_dir, WIDGET, "w1", "w2")
        file = node.plugin_dir / FILE_NAME
        older = file.read_bytes()
        for gone in ("w1", "w2"):
            node.unlink(gone)
            await node.shows(lambda k, it=gone: it not in k.resources[WIDGET].healthy)  # type: ignore[misc]
            agent.pass_minute()
            file.write_bytes(older)
            await agent.takes_turns(20)
        node.mknod("w1", "w2")
        await node.healthy("w1", "w2")
        assert not agent.said("overtaken")


async def test_another_plugin_that_overtakes_a_resource_of_which_nothing_is_healthy_is_followed_too(node: Node) -> None:
    node.mknod("w1")
    async with node.agent() as agent:
        await node.healthy("w1")
        node.unlink("w1")
        await node.healthy()
        async with other_plugin(node, WIDGET, "theirs-0", name="rival.sock"):
            before = node.kubelet.registrations[WIDGET]
            node.mknod("w1")
            await agent.says("overtaken", resource=WIDGET)
        await registered_again(node, agent, before)


async def test_another_plugin_that_was_there_first_and_ends_costs_nothing(node: Node) -> None:
    node.mknod("w1")
    async with other_plugin(node, WIDGET, "theirs-0", name="rival.sock"):
        agent = AgentProcess(node.config(chardev()), SELDOM)
        await agent.__aenter__()
        await node.shows(lambda k: k.resources[WIDGET].healthy == {"w1"})
        await recorded(node.plugin_dir, WIDGET, "w1")  # the kubelet's client may be late to see its own end before
        before = node.kubelet.registrations[WIDGET]
    try:
        await registered_again(node, agent, before)
    finally:
        await agent.kill()
