"""Where inotify has no instances or watches left, everything is found by looking, a little later."""

from __future__ import annotations

import pytest

from tests.e2e.node import WIDGET, Node, chardev
from tests.e2e.process import AgentProcess

OTHER = "fl.test/other"
NO_INSTANCES = """
import errno
from agent.discovery import paths
def no_instance(): raise OSError(errno.EMFILE, "none left")
paths.Inotify, paths.POLL = no_instance, 0.1
"""
NO_WATCHES = """
import errno
from agent.discovery import paths
class Full(paths.Inotify):
    def add_watch(self, *_): raise OSError(errno.ENOSPC, "none left")
paths.Inotify, paths.POLL = Full, 0.1
"""


@pytest.mark.parametrize(
    ("prelude", "advice"),
    [(NO_INSTANCES, "fs.inotify.max_user_instances"), (NO_WATCHES, "fs.inotify.max_user_watches")],
    ids=["no instances", "no watches"],
)
async def test_all_that_events_would_tell_is_found_by_looking(bare_node: Node, prelude: str, advice: str) -> None:
    node = bare_node
    node.mknod("w1")
    hours = {"resync": "100h", "probe": "100h"}
    async with AgentProcess(node.config(chardev(), **hours), prelude) as agent:
        assert advice in (await agent.says("directory-unwatched"))["then"]
        await agent.says("ready")
        async with node.kubelet:  # the plugin directory, and the kubelet's socket, come later
            await node.registered()
            await node.healthy("w1")
            node.mknod("w2")
            await node.healthy("w1", "w2")
            node.unlink("w1")
            await node.healthy("w2")
            node.mknod("x1")
            node.config(chardev(), chardev("/dev/x*", OTHER), **hours)
            await node.registered(WIDGET, OTHER)
            await node.healthy("x1", resource=OTHER)
            before = node.kubelet.registrations[WIDGET]
            await node.kubelet.restart()
            await node.kubelet.wait_for(lambda k: k.registrations[WIDGET] > before)
            await node.registered(WIDGET, OTHER)
            assert not agent.said("part-failed")


NO_EVENTS = """
import os
from agent.discovery import paths
paths.POLL = 0.1
paths.DirectoryWatch._receive = lambda self, inotify, failed: os.read(inotify.fileno(), 65536)
"""  # as on a file system that tells inotify nothing


async def test_a_kubelet_and_a_configuration_of_which_no_event_tells_are_found(bare_node: Node) -> None:
    node = bare_node
    node.mknod("w1", "x1")
    node.plugin_dir.mkdir()
    async with AgentProcess(node.config(chardev()), NO_EVENTS) as agent:
        await agent.says("waiting-for-kubelet")
        async with node.kubelet:
            await node.registered()
            node.config(chardev(), chardev("/dev/x*", OTHER))
            await node.registered(WIDGET, OTHER)
            before = node.kubelet.registrations[WIDGET]
            await node.kubelet.restart()
            await node.kubelet.wait_for(lambda k: k.registrations[WIDGET] > before)
