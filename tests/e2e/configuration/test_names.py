"""Names that are templates: resources come with their first device, and what a pod holds of them is never lost."""

from __future__ import annotations

import json
import signal

import pytest

from agent.simulation.demo_stage import write_stub_file
from agent.simulation.model import Kind, Phase
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish
from tests.wait import until

TEMPLATE = "fl.test/mig-{profile}"
SMALL, LARGE = "fl.test/mig-1g.5gb", "fl.test/mig-1g.10gb.me"
RENAMED = "fl.test/part-1g.5gb"

DEAF = """
import anyio
from agent.daemon import reload
async def watch(self): await anyio.sleep_forever()
reload.Reloader.watch = watch
"""  # to changes of the file: only a signal has it read


def parts(name: str = TEMPLATE, *more: str) -> str:
    """stub-0 and stub-1 are small, stub-2 is large, stub-3 has no profile."""
    return "\n".join(
        [
            "[[resource]]",
            f'name = "{name}"',
            'backend = "stub"',
            "devices = [",
            '  { count = 2, attributes = { profile = "1g.5gb" } },',
            '  { attributes = { profile = "1g.10gb+me" } },',
            "  {},",
            "]",
            'file = "/dev/stub"',
            *more,
        ]
    )


def there(node: Node, *ids: str) -> None:
    """Of the devices these alone are there."""
    write_stub_file(node.dev / "stub", "\n".join(["* gone", *(f"{device_id} healthy" for device_id in ids)]) + "\n")


async def reload(agent: AgentProcess, *resources: str, node: Node) -> None:
    node.config(*resources)
    done = len(agent.said("config-reloaded"))
    agent.signal(signal.SIGHUP)
    await until(lambda: len(agent.said("config-reloaded")) > done, "the end of a reload")


async def ask(node: Node, command: str, *arguments: str) -> str:
    code, out, err = await finish(command, *arguments, "--config", str(node.root / "config.toml"))
    assert (code, err) == (0, "")
    return out


# --- resources come ---


async def test_a_device_that_appears_has_its_resource_registered_and_another_hears_nothing_of_it(node: Node) -> None:
    node.mknod("w1")
    there(node)
    async with node.agent(chardev(), parts()) as agent:
        await node.healthy("w1")
        assert node.kubelet.resources.keys() == {WIDGET}
        lists = sum(change.resource == WIDGET for change in node.lists)

        there(node, "stub-2")
        await node.healthy("stub-2", resource=LARGE)
        there(node, "stub-1", "stub-2")
        await node.healthy("stub-1", resource=SMALL)
        assert (await node.admit(pod(resource=SMALL))).phase == Phase.RUNNING

        there(node, "stub-1")
        await node.healthy(resource=LARGE)  # it is still served, with nothing in it
        there(node, "stub-1", "stub-2")
        await node.healthy("stub-2", resource=LARGE)

        named = [(line["resource"], line["template"]) for line in agent.said("resource-named")]
        assert named == [(LARGE, TEMPLATE), (SMALL, TEMPLATE)]
        assert node.kubelet.streams(LARGE) == 1
        assert sum(change.resource == WIDGET for change in node.lists) == lists
    assert node.kubelet.panics == []


async def test_a_template_is_shown_with_what_it_gave_and_whom_it_cannot_name(node: Node) -> None:
    there(node)
    async with node.agent(chardev(), parts()) as agent:
        assert f"{TEMPLATE}: no device gives it a name so far" in await ask(node, "status")
        there(node, "stub-0", "stub-3")
        await agent.says("resource-listed", resource=SMALL)
        status = json.loads(await ask(node, "status", "--json"))
        assert status["templates"] == [{"name": TEMPLATE, "backend": "stub", "complaint": "", "resources": [SMALL]}]
        why = "it has no profile, after which it would be named"
        (unclaimed,) = status["unclaimed"]
        assert (unclaimed["device"], unclaimed["why"]) == ("stub-3", f"{TEMPLATE} does not take it: {why}")
        explained = json.loads(await ask(node, "explain", "stub-3", "--json"))
        assert explained["decisions"] == [{"resource": TEMPLATE, "taken": False, "why": f"does not take it: {why}"}]
        explained = json.loads(await ask(node, "explain", f"{SMALL}/stub-0", "--json"))
        assert (explained["resource"], explained["gift"]["envs"]) == (
            SMALL,
            {"FAIRLEAD_STUB_FL_TEST_MIG_1G_5GB": "stub-0"},
        )


async def test_a_look_without_a_daemon_says_the_same(node: Node) -> None:
    there(node, "stub-0", "stub-3")
    node.config(parts(), parts("fl.test/x-{colour}"))
    out = await ask(node, "discover")
    assert out.splitlines()[:3] == [
        f"{SMALL}: 1 healthy",
        "  stub-0, healthy",
        "fl.test/x-{colour}: no device gives it a name so far",
    ]
    document = json.loads(await ask(node, "discover", "--json"))
    assert [resource["name"] for resource in document["resources"]] == [SMALL]
    assert document["templates"] == [
        {"name": TEMPLATE, "resources": [SMALL]},
        {"name": "fl.test/x-{colour}", "resources": []},
    ]
    assert f"{TEMPLATE}  stub, a resource for each profile" in await ask(node, "validate")


# --- what pods hold ---


@pytest.mark.parametrize("lost", [False, True], ids=["state kept", "state lost"])
async def test_what_is_held_of_a_resource_that_no_device_names_is_served_after_a_kill(node: Node, lost: bool) -> None:
    there(node, "stub-2")
    async with node.agent(chardev(), parts()) as agent:
        await node.healthy("stub-2", resource=LARGE)
        assert (await node.admit(pod(resource=LARGE))).phase == Phase.RUNNING
        await agent.kill()
    there(node)
    if lost:
        node.lose_state()
    since = len(node.lists)
    async with node.agent(chardev(), parts()):
        await node.shows(lambda k: k.resources[LARGE].unhealthy == {"stub-2"}, LARGE)
        assert node.lists_without("stub-2", since, LARGE) == []
        why = "unmapped" if lost else "the device is gone; a pod still holds it"  # nothing tells what it was
        assert why in await ask(node, "status")
        there(node, "stub-2")
        await node.healthy("stub-2", resource=LARGE)
        assert node.lists_without("stub-2", since, LARGE) == []
    assert node.kubelet.panics == []


# --- another configuration ---


async def test_templates_come_change_and_go(node: Node) -> None:
    node.mknod("w1")
    there(node, "stub-0", "stub-2")
    opened: list[str] = []
    node.kubelet.subscribe(lambda c: opened.append(c.resource) if c.kind is Kind.STREAM_OPENED else None)
    async with node.agent(chardev(), prelude=DEAF) as agent:
        await reload(agent, chardev(), parts(), node=node)
        await node.healthy("stub-0", resource=SMALL)
        await node.healthy("stub-2", resource=LARGE)
        assert (await node.admit(pod(resource=SMALL))).phase == Phase.RUNNING

        only = parts(TEMPLATE, 'exclude = { profile = "1g.10gb+me" }', 'pre_start = "check"')
        await reload(agent, chardev(), only, node=node)
        await node.healthy(resource=LARGE)  # the template is there: what it gave is served
        await node.healthy("stub-0", resource=SMALL)
        await until(lambda: sorted(opened) == sorted([WIDGET, SMALL, LARGE, SMALL, LARGE]), "other options of both")

        since = len(node.lists)
        await reload(agent, chardev(), parts("fl.test/part-{profile}"), node=node)
        await node.shows(lambda k: k.resources[SMALL].unhealthy == {"stub-0"}, SMALL)  # a pod holds it
        await until(lambda: node.kubelet.streams(LARGE) == 0, "the end of what nobody holds")
        assert node.lists_without("stub-0", since, SMALL) == []
        await node.healthy("stub-2", resource="fl.test/part-1g.10gb.me")
        assert agent.said("resource-retired") == agent.said("resource-retired", resource=LARGE)
        assert sum(change.resource == WIDGET for change in node.lists) == 1
    assert node.kubelet.panics == []


async def test_names_that_came_and_went_leave_nothing_behind_and_come_back_at_once(node: Node) -> None:
    names = [f"fl.test/v-v{number}" for number in range(6)]
    few = "from agent.inventory import inventory\ninventory.MOST_EMPTY = 2\n"
    async with node.agent(chardev(), chardev("/dev/v*", "fl.test/v-{devname}"), node.serving, prelude=few) as agent:
        for number, name in enumerate(names):
            if number == 3:  # all else that the agent opens is open by now
                before = agent.open_files()
            node.mknod(f"v{number}")
            await node.healthy(f"v{number}", resource=name)
            node.unlink(f"v{number}")
            await node.healthy(resource=name)
        for name in names[:4]:
            await agent.says("resource-retired", resource=name)
        await until(lambda: agent.open_files() <= before, "a socket and a stream for each that stays, and no more")
        assert [node.kubelet.streams(name) for name in names] == [0, 0, 0, 0, 1, 1]
        metrics = await node.get("/metrics")
        assert names[0] not in metrics
        assert names[5] in metrics
        node.mknod("v0")
        await node.healthy("v0", resource=names[0])
        assert (await node.admit(pod(resource=names[0]))).phase == Phase.RUNNING
        node.unlink("v0")
        await node.shows(lambda k: k.resources[names[0]].unhealthy == {"v0"}, names[0])
        for number in range(1, 6):
            node.mknod(f"v{number}")
            await node.healthy(f"v{number}", resource=names[number])
            node.unlink(f"v{number}")
        await agent.says("resource-retired", times=2, resource=names[3])
        assert node.kubelet.streams(names[0]) == 1, "a pod holds it"
    assert node.kubelet.panics == []
