"""One real H100, as its machine showed it (tests/backends/gpu/h100): its tree, and what its driver printed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.discovery import kmsg
from tests.backends.trees import plant
from tests.e2e.kmsg import KernelLog
from tests.e2e.node import Node, pod
from tests.e2e.process import finish
from tests.wait import until

RECORDED = Path(__file__).parents[2] / "backends/gpu/h100"
NODES = "dev/nvidia0 c 195:0\ndev/nvidiactl c 195:255\ndev/nvidia-uvm c 238:0\ndev/nvidia-uvm-tools c 238:1\n"
GPUS = "nvidia.com/gpu"
RESOURCE = f'[[resource]]\nname = "{GPUS}"\nbackend = "gpu"\n'
UUID = "GPU-00000000-0000-4000-8000-0000000000a1"
LINES = {
    line.sequence: line.text for one in kmsg.split((RECORDED / "kmsg.txt").read_bytes())[0] if (line := kmsg.parse(one))
}


@pytest.fixture
def machine(bare_node: Node) -> Path:
    subprocess.run(["tar", "xzf", RECORDED / "tree.tar.gz", "-C", bare_node.root], check=True)
    bare_node.dev.mkdir(exist_ok=True)
    plant(bare_node.root, NODES)
    return bare_node.root


@pytest.fixture
def log(machine: Path) -> Iterator[KernelLog]:
    with KernelLog(machine / "dev/kmsg") as made:
        yield made


async def test_what_the_driver_logged_before_the_start_is_in_the_first_list(
    node: Node, machine: Path, log: KernelLog
) -> None:
    log.write((RECORDED / "kmsg.txt").read_bytes())
    async with node.agent(f"{RESOURCE}xid_critical = [31]\n", sys=f"{machine}/sys", proc=f"{machine}/proc"):
        first = next(change.after for change in node.lists if change.resource == GPUS)
        assert first is not None
        assert first.unhealthy == {UUID}


async def test_a_fault_of_an_application_is_told_with_its_process_and_pod_and_changes_no_list(
    node: Node, machine: Path, log: KernelLog
) -> None:
    async with node.agent(RESOURCE, sys=f"{machine}/sys", proc=f"{machine}/proc") as agent:
        await node.healthy(UUID, resource=GPUS)
        await node.admit(pod("llama-0", GPUS))
        config = str(node.root / "config.toml")

        async def named() -> bool:
            return "llama-0" in (await finish("status", "--pods", "--config", config))[1]

        while not await named():
            pass
        since = len(node.lists)
        for sequence in (362, 363, 364):
            log.say(LINES[sequence], flags="c")
        said = await agent.says("hardware-noted")
        assert said["reason"] == "xid-13"
        assert (said["pid"], said["process"], said["pods"]) == (1641, "python3", ["default/llama-0"])
        for command in (("explain", UUID), ("status", "--history", UUID), ("events",)):
            _, shown, _ = await finish(*command[:1], "--config", config, *command[1:])
            words = " ".join(shown.split())
            assert "xid-13" in words, command
            assert "1641" in words, command
            assert "default/llama-0" in words, command
        log.say("NVRM: GPU 0000:00:06.0: RmInitAdapter failed! (0x24:0x72:1568)", flags="c")
        await node.healthy(resource=GPUS)
        await until(lambda: len(node.lists) == since + 1)
        assert len(agent.said("hardware-noted")) == 1
