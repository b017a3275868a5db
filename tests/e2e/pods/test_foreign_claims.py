"""Hardware that an earlier plugin gave to a pod is given to no other until that pod is gone."""

from __future__ import annotations

import json

import pytest

from agent.simulation.model import Phase, State
from tests.e2e.foreign import hold, other_plugin
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.pods.test_claims import OFTEN_ASKING
from tests.e2e.process import finish

THEIRS = "other.test/widget"


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
        await node.healthy("w2", held)
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


async def test_hardware_that_another_plugin_gave_away_is_not_offered_though_our_own_claim_of_it_has_not_ended(
    node: Node,
) -> None:
    """The kubelet has forgotten our pod, and would give the device away once more."""
    node.mknod("w1", "w2")
    async with node.agent() as agent:
        ours, _ = await hold(node, WIDGET, "ours", 2)
        async with other_plugin(node, WIDGET, "a-0", name="rival.sock", nodes=["/dev/w1"]):
            node.kubelet.end(ours)
            _, held = await hold(node, WIDGET)
            await agent.says("overtaken", resource=WIDGET)
            since = len(node.lists)
        await agent.says("registration-lost", resource=WIDGET)
        await node.shows(lambda k: "w2" in k.resources[WIDGET].healthy)
        assert not agent.said("claims-ended")
        assert not any("w1" in change.after.healthy for change in node.lists[since:] if change.after)
        assert held in node.kubelet.resources[WIDGET].unhealthy


async def test_shared_hardware_of_an_earlier_plugins_pod_is_offered_once_less(node: Node) -> None:
    node.mknod("w1")
    async with other_plugin(node, WIDGET, "a-0", "a-1", nodes=["/dev/w1"]):
        _, held = await hold(node, WIDGET)
    async with node.agent(chardev(count=3)):
        await node.shows(lambda k: held in k.resources[WIDGET].healthy)
        assert len(node.kubelet.resources[WIDGET].healthy) == 3
        assert len(node.kubelet.resources[WIDGET].unhealthy) == 1


@pytest.mark.parametrize(("name", "held"), [(WIDGET, ["a-0"]), (THEIRS, [])], ids=["our name", "another name"])
async def test_a_device_that_comes_later_and_an_earlier_plugins_pod_has_is_never_offered(
    node: Node, name: str, held: list[str]
) -> None:
    node.mknod("w2")
    async with other_plugin(node, name, "a-0", nodes=["/dev/w1"]):
        await hold(node, name)
    since = len(node.lists)
    async with node.agent(chardev(), chardev("/dev/x*", "fl.test/x")):
        await node.healthy("w2")
        node.mknod("w1", "x1")
        await node.healthy("x1", resource="fl.test/x")
        node.mknod("w3")
        await node.healthy("w2", "w3", *held)
        assert not any("w1" in c.after.healthy for c in node.lists[since:] if c.after and c.resource == WIDGET)


@pytest.mark.parametrize("nodes", [(), ("/dev/null",), ("/dev/w*",)], ids=["none", "unknown", "no path"])
async def test_an_answer_that_leads_to_no_device_holds_none(node: Node, nodes: tuple[str, ...]) -> None:
    node.mknod("w1")
    async with other_plugin(node, WIDGET, "a-0", nodes=nodes):
        await hold(node, WIDGET)
    async with node.agent():
        await node.healthy("w1")


async def test_a_container_with_two_devices_of_an_earlier_plugin_keeps_both_and_a_next_pod_gets_what_it_leaves(
    node: Node,
) -> None:
    node.mknod("w1", "w2", "w3")
    async with other_plugin(node, WIDGET, "a-0", "a-1", nodes=["/dev/w1", "/dev/w2"]):
        holder, _ = await hold(node, WIDGET, count=2)
    async with node.agent(prelude=OFTEN_ASKING) as agent:
        await node.healthy("a-0", "a-1", "w3")
        first = pod("first")
        assert (await node.admit(first)).phase == Phase.RUNNING
        assert node.held(first) == {"w3"}
        node.kubelet.end(holder)
        second = pod("second")
        assert (await node.admit(second)).phase == Phase.RUNNING, "it is free before we know that its pod has ended"
        (given,) = node.held(second)
        agent.pass_minute()
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) == 3 and len(node.listed()) == 4)
        assert given in node.listed()
        node.kubelet.end(second)
        agent.pass_minute()
        await node.healthy("w1", "w2", "w3")
    assert node.kubelet.panics == []


async def test_a_container_of_an_earlier_plugins_pod_starts_again_where_its_device_is_fit(node: Node) -> None:
    node.mknod("w1", "w2")
    async with other_plugin(node, WIDGET, "a-0", nodes=["/dev/w1"]):
        holder = pod("foreign")
        main = (await node.admit(holder)).containers["main"]
        assert node.held(holder) == {"a-0"}
    async with node.agent(chardev() + 'pre_start = "check"\n'):
        await node.healthy("a-0", "w2")
        await node.kubelet.restart_container(holder, "main")
        assert (main.state, main.starts) == (State.RUNNING, 2)
        node.unlink("w1")
        await node.healthy("w2")
        await node.kubelet.restart_container(holder, "main")
        assert (main.state, main.starts) == (State.WAITING, 2)


async def test_nothing_of_a_strict_resource_is_offered_while_nobody_knows_what_an_earlier_plugins_pod_has(
    node: Node,
) -> None:
    node.mknod("w2", "w3")
    async with other_plugin(node, WIDGET, "a-0", nodes=["/dev/w1"]):
        holder, held = await hold(node, WIDGET)
    strict = chardev() + 'adopt = "strict"\n'
    async with node.agent(strict, prelude=OFTEN_ASKING) as agent:
        await node.shows(lambda _: node.listed() == {"a-0", "w2", "w3"})
        assert not node.kubelet.resources[WIDGET].healthy
        assert (await node.admit(pod("early"))).phase == Phase.FAILED
        for command in (("status",), ("explain", "w2")):
            shown = json.dumps(await asked(node, *command))
            assert "withheld" in shown
            assert held in shown
        _, doctor, _ = await finish("doctor", "--config", str(node.root / "config.toml"))
        assert f"pods hold {held} of this resource" in " ".join(doctor.split())
        node.mknod("w1")  # what it leads to: now it is known
        await node.healthy("w2", "w3", "a-0")
        node.unlink("w1")
        await node.healthy("w2", "w3")
        node.kubelet.end(holder)
        agent.pass_minute()
        await node.shows(lambda _: node.listed() == {"w2", "w3"})
    async with other_plugin(node, WIDGET, "b-0"):
        holder, _ = await hold(node, WIDGET, "nameless")
    async with node.agent(strict, prelude=OFTEN_ASKING) as agent:
        await node.shows(lambda _: node.listed() == {"b-0", "w2", "w3"})
        assert not node.kubelet.resources[WIDGET].healthy
        node.kubelet.end(holder)
        agent.pass_minute()
        await node.healthy("w2", "w3")
    assert node.kubelet.panics == []


# --- of a resource that is not ours ---


async def test_hardware_that_a_pod_has_through_another_plugins_resource_is_not_offered_until_it_ends(
    node: Node,
) -> None:
    node.mknod("w1", "w2")
    async with other_plugin(node, THEIRS, "a-0", nodes=["/dev/w1"]):
        holder, _ = await hold(node, THEIRS)
    since = len(node.lists)
    for restarted in (False, True):
        async with node.agent(prelude=OFTEN_ASKING) as agent:
            await node.healthy("w2")
            assert node.listed() == {"w1", "w2"}
            assert not any("w1" in c.after.healthy for c in node.lists[since:] if c.after and c.resource == WIDGET)
            for command in (("status",), ("explain", "w1")):
                shown = json.dumps(await asked(node, *command))
                assert "foreign" in shown
                assert f"{THEIRS}/a-0" in shown
            assert agent.said("ready")[0]["resources"] == [WIDGET]
            if restarted:
                node.kubelet.end(holder)
                agent.pass_minute()
                await node.healthy("w1", "w2")
            else:
                await agent.kill()
    assert node.kubelet.panics == []


async def test_hardware_that_another_plugin_gives_to_a_pod_while_it_lives_is_offered_no_more(node: Node) -> None:
    node.mknod("w1", "w2")
    async with (
        node.agent(prelude=OFTEN_ASKING) as agent,
        other_plugin(node, THEIRS, "a-0", nodes=["/dev/w1"]),
    ):
        await node.healthy("w1", "w2")
        holder, _ = await hold(node, THEIRS)
        await node.healthy("w2")
        node.kubelet.end(holder)
        agent.pass_minute()
        await node.healthy("w1", "w2")


async def test_what_several_pods_may_have_is_offered_whatever_other_resources_give(node: Node) -> None:
    node.mknod("w1", "x1")
    async with other_plugin(node, THEIRS, "a-0", "a-1", nodes=["/dev/w1", "/dev/x1"]):
        await hold(node, THEIRS)
        shared = (
            f'[[resource]]\nname = "{WIDGET}"\nbackend = "chardev"\n'
            'paths = [{ path = "/dev/w1" }, { path = "/dev/x1", shared = true }]\ncount = 3\n'
        )
        bundle = (
            '[[resource]]\nname = "fl.test/bundle"\nbackend = "chardev"\n'
            'paths = [{ path = "/dev/x1", shared = true }]\n'
        )
        async with node.agent(shared, bundle, chardev("/dev/y*", "fl.test/y")):
            await node.shows(lambda k: len(k.resources[WIDGET].healthy) == 3)
            await node.shows(lambda k: len(k.resources["fl.test/bundle"].healthy) == 1, "fl.test/bundle")
            node.mknod("y1")
            await node.healthy("y1", resource="fl.test/y")
            assert len(node.kubelet.resources[WIDGET].healthy) == 3


async def test_another_plugins_resource_that_becomes_ours_lists_what_its_pods_hold(node: Node) -> None:
    node.mknod("w1", "w2")
    async with other_plugin(node, THEIRS, "a-0", nodes=["/dev/w1"]):
        await hold(node, THEIRS)
    async with node.agent(prelude=OFTEN_ASKING) as agent:
        await node.healthy("w2")
        since = len(node.lists)
        node.config(chardev(name=THEIRS))
        await agent.says("config-reloaded")
        await node.healthy("w2", "a-0", resource=THEIRS)
        assert node.lists_without("a-0", since, THEIRS) == []


async def test_one_id_of_another_plugin_holds_other_hardware_each_time_it_is_given(node: Node) -> None:
    """That plugin comes and goes beside a running agent; its second pod has another device than its first."""
    node.mknod("w1", "w2")
    async with node.agent(prelude=OFTEN_ASKING) as agent:
        await node.healthy("w1", "w2")
        for taken, free in (("w1", "w2"), ("w2", "w1")):
            async with other_plugin(node, WIDGET, "a-0", nodes=[f"/dev/{taken}"]):
                holder, held = await hold(node, WIDGET)
                since = len(node.lists)
            await node.registered()
            await node.healthy(free, held)
            assert not any(taken in change.after.healthy for change in node.lists[since:] if change.after)
            node.kubelet.end(holder)
            agent.pass_minute()
            await node.healthy("w1", "w2")
            await node.shows(lambda _, it=held: it not in node.listed())  # type: ignore[misc]
    assert node.kubelet.panics == []


async def test_one_id_of_another_plugin_holds_its_later_pods_hardware_though_nobody_saw_the_earlier_one_end(
    node: Node,
) -> None:
    """That plugin overtakes us twice within the minute that a claim takes to end; each pod has another device."""
    node.mknod("w1", "w2")
    prelude = "from agent.kubelet import rivals; rivals.INTERVAL = 0.1"  # what is lost twice is registered as soon
    async with node.agent(prelude=prelude) as agent:
        await node.healthy("w1", "w2")
        for taken, free in (("w1", "w2"), ("w2", "w1")):
            async with other_plugin(node, WIDGET, "a-0", name="rival.sock", nodes=[f"/dev/{taken}"]):
                holder, held = await hold(node, WIDGET)
                since = len(node.lists)
            await node.shows(lambda k, it=frozenset([free]): k.resources[WIDGET].healthy - {"a-0"} == it)  # type: ignore[misc]
            assert node.lists_without(held, since) == []
            node.kubelet.end(holder)
        assert not agent.said("claims-ended")
    assert node.kubelet.panics == []
