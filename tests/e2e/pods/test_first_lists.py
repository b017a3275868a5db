"""Kubelet contract: A7.2; no list lacks an ID that the kubelet's checkpoint says a pod holds, whoever gave it to the pod."""

from __future__ import annotations

import signal

import pytest

from tests.e2e.foreign import hold, other_plugin
from tests.e2e.node import Node, chardev
from tests.e2e.process import AgentProcess
from tests.wait import until

STUB = "fl.test/stub-fast"
RARE = "from agent.kubelet import pod_claims\npod_claims.IDLE = 3600.0\n"
"""Nobody asks the kubelet again by himself, as within any minute."""


def stub(name: str = STUB, file: str = "") -> str:
    lines = ["[[resource]]", f'name = "{name}"', 'backend = "stub"']
    device = '{ count = 2, numa_node = 0, attributes = { kind = "fast" } }'
    return "\n".join([*lines, f"devices = [{device}]", f'file = "{file}"' if file else ""])


async def hold_of_another(node: Node, resource: str = STUB) -> str:
    """The ID that a pod was given by another plugin, which is gone."""
    async with other_plugin(node, resource, "a-0", "a-1", numa_node=0):
        return (await hold(node, resource))[1]


async def listed_over_a_restart(node: Node, held: str, since: int) -> None:
    """Every list has it, and a kubelet with a topology manager survives its restart."""
    await node.registered(STUB)
    assert node.lists_without(held, since, STUB) == []
    await node.kubelet.restart()
    await node.registered(STUB)
    assert node.lists_without(held, since, STUB) == []
    assert node.kubelet.panics == []


@pytest.mark.parametrize("name", [STUB, "fl.test/stub-{kind}"], ids=["resource", "template"])
async def test_a_resource_that_a_reload_brings_lists_what_another_plugins_pod_holds(node: Node, name: str) -> None:
    node.mknod("w1")
    async with node.agent(prelude=RARE) as agent:
        held = await hold_of_another(node)
        since = len(node.lists)
        node.config(chardev(), stub(name))
        agent.signal(signal.SIGHUP)
        await listed_over_a_restart(node, held, since)


async def test_a_resource_that_a_device_gives_its_name_lists_what_another_plugins_pod_holds(
    node: Node,
) -> None:
    (node.dev / "states").write_text("* gone\n")
    node.mknod("w1")
    async with node.agent(chardev(), stub("fl.test/stub-{kind}", "/dev/states"), prelude=RARE):
        held = await hold_of_another(node)
        since = len(node.lists)
        (node.dev / "states").write_text("* healthy\n")
        await listed_over_a_restart(node, held, since)


async def test_a_start_lists_what_another_plugins_pod_holds(node: Node) -> None:
    held = await hold_of_another(node)
    since = len(node.lists)
    async with node.agent(stub(), prelude=RARE):
        await listed_over_a_restart(node, held, since)


async def test_the_next_list_has_what_another_plugin_gave_to_a_pod_meanwhile(node: Node) -> None:
    (node.dev / "states").write_text("* healthy\n")
    async with node.agent(stub(file="/dev/states"), prelude=RARE):
        held = await hold_of_another(node)
        since = len(node.lists)
        (node.dev / "states").write_text("stub-0 unhealthy\n")
        await until(lambda: any(it.resource == STUB for it in node.lists[since:]), "another list")
        await listed_over_a_restart(node, held, since)


async def test_a_checkpoint_that_nobody_can_read_holds_no_list_up(node: Node) -> None:
    """The kubelet would replace a directory in its place no more than it would a file system that hangs."""
    (node.plugin_dir / "kubelet_internal_checkpoint").mkdir()
    node.mknod("w1")
    async with AgentProcess(node.config(chardev()), RARE) as agent:
        await agent.says("witness-silent", witness="checkpoint")
        (node.plugin_dir / "kubelet_internal_checkpoint").rmdir()
        await node.healthy("w1")
