"""What the agent itself is short of is said, and is no fault of the hardware's."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Trouble
from tests.e2e.node import WIDGET, Node

FULL = """
import os, resource, signal
held = []

def take_all(*_):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    while True:
        try:
            held.append(os.open("/", os.O_PATH))
        except OSError:
            break

def give_back(*_):
    while held:
        os.close(held.pop())

signal.signal(signal.SIGUSR1, take_all)
signal.signal(signal.SIGUSR2, give_back)
"""


async def test_without_a_descriptor_hardware_is_as_it_was_last_seen_and_what_is_short_is_said(node: Node) -> None:
    node.mknod("w1", "w2")
    async with node.agent(prelude=FULL) as agent:
        await node.healthy("w1", "w2")
        agent.signal(signal.SIGUSR1)
        lists = len(node.lists)
        node.mknod("w3")
        said = await agent.says("discovery-problem")
        assert "Fairlead itself is short of something: Too many open files" in said["reason"]
        assert node.listed() == node.kubelet.resources[WIDGET].healthy == {"w1", "w2"}
        agent.signal(signal.SIGUSR2)
        await node.healthy("w1", "w2", "w3")
        assert [c.after for c in node.lists[lists:] if c.after and not {"w1", "w2"} <= c.after.healthy] == []
        await agent.says("discovery-problem-solved")


@pytest.mark.parametrize("call", ["discover", "probe"])
async def test_a_file_of_ours_that_cannot_be_read_is_named_and_hardware_is_as_it_was_last_seen(
    node: Node, trouble: Trouble, call: str
) -> None:
    node.mknod("t0/a")
    async with node.agent(trouble.resource(), environment=trouble.environment) as agent:
        await node.healthy("a", resource="fl.test/troubled0")
        since = len(node.lists)
        trouble.order(call, "odd open('/proc/self/mem').read()")  # what a disk does to a module of Python's
        node.mknod("t0/b")
        line = await agent.says("discovery-problem")
        assert "Input/output error" in line["reason"]
        assert not agent.said("device-changed", state="Unhealthy")
        trouble.forget(call)
        await node.healthy("a", "b", resource="fl.test/troubled0")
        assert all("a" in change.after.healthy for change in node.lists[since:] if change.after)


async def test_the_limit_of_open_files_is_raised_at_the_start(node: Node) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(7)[1]))"
    async with node.agent(prelude=low) as agent:
        limits = Path(f"/proc/{agent.pid}/limits").read_text()
        (line,) = (line.split() for line in limits.splitlines() if line.startswith("Max open files"))
        assert int(line[3]) == (1 << 20 if hard == resource.RLIM_INFINITY else hard)
