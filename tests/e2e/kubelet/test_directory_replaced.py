"""The plugin directory is removed and made again: one agent serves, and each resource has one stream."""

from __future__ import annotations

import signal

from tests.e2e.node import WIDGET, Node, chardev
from tests.e2e.process import AgentProcess
from tests.wait import until


async def test_two_agents_never_serve_a_directory_that_was_made_again(node: Node) -> None:
    node.mknod("w1")
    async with node.agent() as first:
        await node.healthy("w1")
        await node.kubelet.stop()
        node.remove(node.plugin_dir)
        node.plugin_dir.mkdir()
        async with AgentProcess(node.config(chardev())) as second:
            await node.kubelet.start()
            await first.says("plugin-directory-replaced")
            await until(lambda: first.said("another-agent-runs") or second.said("another-agent-runs"), "one that waits")
            waits, serves = (first, second) if first.said("another-agent-runs") else (second, first)
            assert waits.said("another-agent-runs")[0]["pid"] == str(serves.pid)
            await node.registered()
            await waits.takes_turns(20)
            assert node.kubelet.streams(WIDGET) == 1
            await node.healthy("w1")
            serves.signal(signal.SIGTERM)
            await serves.ended()
            await waits.says("took-over")
            await node.registered()
            await node.healthy("w1")


async def test_of_two_agents_that_run_one_serves_the_directory_that_was_made_again(node: Node) -> None:
    """Whichever it is; and the other one serves when that is gone, though it waited for a lock that is gone."""
    node.mknod("w1")
    async with node.agent() as first, AgentProcess(node.config(chardev())) as second:
        await second.says("another-agent-runs")
        await node.kubelet.stop()
        node.plugin_dir.rename(node.root / "before")
        await node.kubelet.start()
        await first.says("plugin-directory-replaced")
        await node.registered()
        await second.takes_turns(20)
        assert node.kubelet.streams(WIDGET) == 1
        await first.kill()
        await second.says("registered")
        await node.registered()
        await node.healthy("w1")
