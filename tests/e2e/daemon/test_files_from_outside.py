"""A FIFO, a device or a file without an end where the daemon reads one stops nothing and nobody."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.kubelet.witnesses import FILE_NAME
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish
from tests.nodes import make_node

PATIENT = """
from agent.kubelet import witnesses
witnesses._DEADLINE = 3600.0
"""  # what opens or reads without an end is not cut off


def zeros(path: Path) -> None:
    make_node(path, "c", 1, 5)


def forged(path: Path) -> None:
    """More devices than any node has."""
    ids = [f"w{n:06}" for n in range(300_000)]
    entries = [{"PodUID": "u", "ContainerName": "c", "ResourceName": WIDGET, "AllocResp": "", "DeviceIDs": {"-1": ids}}]
    path.write_text(json.dumps({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1}))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "FIFO"),
        (zeros, "character device"),
        (lambda path: path.symlink_to("/dev/zero"), "symbolic link"),
        (forged, "300000 devices"),
    ],
)
async def test_a_checkpoint_that_is_none_is_named_and_everything_goes_on(
    node: Node, make: Callable[[Path], object], reason: str
) -> None:
    node.mknod("w1", "w2")
    path = node.plugin_dir / FILE_NAME
    path.unlink(missing_ok=True)
    make(path)
    async with node.agent(prelude=PATIENT) as agent:
        line = await agent.says("witness-silent", witness="checkpoint")
        assert reason in line["reason"]
        await node.healthy("w1", "w2")
        assert node.listed() == {"w1", "w2"}
        await node.admit(pod())
        node.mknod("w3")
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) == 3)
        code, out, err = await finish("doctor", "--config", str(node.root / "config.toml"))
        assert code in (0, 1, 2), out + err


@pytest.mark.parametrize("make", [os.mkfifo, zeros])
async def test_a_state_file_that_is_none_is_named_and_replaced(node: Node, make: Callable[[Path], object]) -> None:
    node.mknod("w1")
    node.state.mkdir()
    make(node.state / "state.json")
    async with node.agent() as agent:
        assert "not a regular file" in (await agent.says("state-unreadable"))["reason"]
        await node.admit(pod())
        assert (node.state / "state.json").is_file()


@pytest.mark.parametrize("make", [os.mkfifo, zeros])
async def test_a_configuration_that_is_none_is_refused_at_once(node: Node, make: Callable[[Path], object]) -> None:
    make(node.root / "odd.toml")
    for command in ("run", "validate", "discover"):
        code, out, err = await finish(command, "--config", str(node.root / "odd.toml"))
        assert code == 2
        assert "not a regular file" in out + err
    code, _, _ = await finish("status", "--config", str(node.root / "odd.toml"))
    assert code == 1


async def test_a_configuration_that_becomes_a_fifo_leaves_the_one_in_force(node: Node) -> None:
    node.mknod("w1")
    async with node.agent() as agent:
        config = node.root / "config.toml"
        config.unlink()
        os.mkfifo(config)
        assert "FIFO" in (await agent.says("config-invalid"))["reason"]
        config.unlink()
        node.config(chardev(), chardev("/dev/v*", "fl.test/other"))
        await agent.says("config-reloaded")
        await node.registered(WIDGET, "fl.test/other")


async def test_an_agent_that_waits_for_nothing_ends(node: Node) -> None:
    os.mkfifo(node.root / "odd.toml")
    async with AgentProcess(node.root / "odd.toml") as agent:
        assert await agent.ended() == 2
