"""What an ordinary user has the kernel quote in its log takes no hardware out of service and costs no memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.machines import CONTROLS, nvidia_gpu, uuid
from tests.backends.trees import planted_host
from tests.e2e.kmsg import KernelLog, record
from tests.e2e.node import Node
from tests.wait import until

GPUS = "nvidia.com/gpu"
RESOURCE = f'[[resource]]\nname = "{GPUS}"\nbackend = "gpu"\n'
FIRST, SECOND = "0000:3b:00", "0000:5e:00"
TAGS = {"SUBSYSTEM": "pci", "DEVICE": f"+pci:{FIRST}.0"}


def xid(place: str, number: int = 79) -> str:
    return f"NVRM: Xid (PCI:{place}): {number}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


@pytest.fixture
def machine(bare_node: Node) -> Path:
    lines = "".join(nvidia_gpu(f"{place}.0", number) for number, place in enumerate([FIRST, SECOND]))
    bare_node.dev.rmdir()
    planted_host(bare_node.root, CONTROLS + lines)
    return bare_node.root


@pytest.fixture
def log(machine: Path) -> Iterator[KernelLog]:
    with KernelLog(machine / "dev/kmsg") as made:
        yield made


async def test_only_lines_that_the_driver_wrote_of_hardware_that_is_there_take_it_out_of_service(
    node: Node, machine: Path, log: KernelLog
) -> None:
    async with node.agent(RESOURCE, sys=f"{machine}/sys", proc=f"{machine}/proc"):
        await node.healthy(uuid(0), uuid(1), resource=GPUS)
        log.say(f"tmpfs: Unknown parameter '{xid(FIRST)}'")
        log.say(f"tmpfs: Unknown parameter '\n{xid(FIRST)}'")
        log.say(f"usb 1-2: Product: {xid(FIRST)}", {"SUBSYSTEM": "usb", "DEVICE": "+usb:1-2"})
        log.say(f"nvidia {FIRST}.0: {xid(FIRST)}")  # without the tags that dev_printk sets
        log.say(f"nvidia {FIRST}.0: {xid(FIRST)}", {"SUBSYSTEM": "pci", "DEVICE": "+pci:0000:00:1f.0"})
        log.say(xid(FIRST), {"SUBSYSTEM": "pci", "DEVICE": "+pci:0000:00:1f.0"})
        log.say(
            "NVRM: Xid (PCI:[4711]: segfault at 3b ip 00005d sp 00007f error 4 in wild[5d1000+1000]"
        )  # a process's name
        log.say("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=")  # a line that another CPU's cuts in two
        log.say("eth0: link is up")
        log.say(xid(FIRST), flags="c")  # goes on with a cgroup's name
        log.say(xid(SECOND))
        await node.healthy(uuid(0), resource=GPUS)
        log.say(f"nvidia {FIRST}.0: {xid(FIRST)}", TAGS)
        await node.healthy(resource=GPUS)
    for first, *_ in [change.after.unhealthy for change in node.lists if change.after and change.after.unhealthy]:
        assert first == uuid(1), "the second GPU is the first that is ever unhealthy"
        break


async def test_any_number_of_lines_about_hardware_that_is_not_there_leaves_nothing_behind(
    node: Node, machine: Path, log: KernelLog
) -> None:
    lines = [xid(f"{n >> 13:04x}:{n >> 5 & 255:02x}:{n & 31:02x}") for n in range(1 << 16, (1 << 16) + 20_000)]
    lines += [xid(FIRST, number) for number in range(200, 300)]  # not in the catalog: shown, and one latch each
    lines += [xid(SECOND)]
    state = node.state / "state.json"
    async with node.agent(f'{RESOURCE}xids = "catalog"\n', sys=f"{machine}/sys", proc=f"{machine}/proc"):
        await node.healthy(uuid(0), uuid(1), resource=GPUS)
        await asyncio.to_thread(_write, log.path, b"".join(record(n, text) for n, text in enumerate(lines)))
        await node.healthy(uuid(0), resource=GPUS)
        await until(lambda: f"pci:{SECOND}" in _latches(state), "the last of them among the latches in the state file")
        last = _latches(state)
    assert last.count('"hardware":"pci:') <= 33


def _latches(state: Path) -> str:
    """The last line of the state that has them; a note of an XID may be written before."""
    lines = state.read_text().splitlines() if state.exists() else []
    return next((line for line in reversed(lines) if '"latches"' in line), "")


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
