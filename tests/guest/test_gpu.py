"""GPUs on a real kernel: they come and go, with a driver, without one, with one that comes late; and their XIDs.

Their /sys, their events, /dev/kmsg and the nodes in /dev/dri are the kernel's. What is pretended is the vendors' code:
the drivers `nvidia`, `amdgpu` and `i915` are others under these names (see `drivers`), /dev/kfd and NVIDIA's nodes are
made as nvidia-modprobe makes them, and /proc/driver is a tmpfs with what NVIDIA's driver would say there.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.guest.drivers import driver
from tests.guest.guest import Card, Guest
from tests.guest.hardware import flood_kernel_log, kernel_says
from tests.guest.node import Log, Node
from tests.guest.vfio_user import FLEX170, H100, MI210

NVIDIA, AMD, INTEL = "nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915"
RESOURCES = f"""
[[resource]]
name = "{NVIDIA}"
backend = "gpu"
select = {{ vendor = "10de" }}
pass_device_specs = true

[[resource]]
name = "{AMD}"
backend = "gpu"
select = {{ vendor = "1002" }}

[[resource]]
name = "{INTEL}"
backend = "gpu"
select = {{ vendor = "8086" }}
"""
UUID = "GPU-7e3c1f58-1d6a-4a6e-9c0b-2f4d8e5a9b10"
NVIDIA_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")
INFORMATION = f"""\
Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 0
GPU UUID: \t {UUID}
Video BIOS: \t 96.00.74.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t %s
Device Minor: \t 0
GPU Excluded:\t No
"""


@pytest.fixture(scope="module", name="agent")
async def _agent(node: Node) -> AsyncIterator[Log]:
    async with node.agent(RESOURCES) as log:
        yield log


@asynccontextmanager
async def nvidia(guest: Guest) -> AsyncIterator[None]:
    """NVIDIA's driver."""
    await guest.run("mount -t tmpfs driver /proc/driver")
    try:
        async with driver(guest, "nvidia", "pci-stub", [H100]):
            yield
    finally:
        await guest.run("umount --lazy /proc/driver")  # the agent may be reading there


@asynccontextmanager
async def started(guest: Guest, address: str) -> AsyncIterator[None]:
    """A GPU that NVIDIA's driver has at this address, with its nodes."""
    gpus = "/proc/driver/nvidia/gpus"
    await guest.write("/proc/driver/new/information", INFORMATION % address)
    control, uvm, own = NVIDIA_NODES
    await guest.run(
        f"mkdir -p {gpus} && mv /proc/driver/new {gpus}/{address} &&"
        f" mknod {control} c 195 255 && mknod {uvm} c 511 0 && mknod {own} c 195 0"
    )
    try:
        yield
    finally:
        await guest.run(f"rm -r {' '.join(NVIDIA_NODES)} /proc/driver/nvidia")


@asynccontextmanager
async def amdgpu(guest: Guest) -> AsyncIterator[None]:
    """AMD's driver."""
    await guest.run("mknod /dev/kfd c 238 0")
    try:
        async with driver(guest, "amdgpu", "cirrus", [MI210]):
            yield
    finally:
        await guest.run("rm /dev/kfd")


@asynccontextmanager
async def i915(guest: Guest) -> AsyncIterator[None]:
    """Intel's driver."""
    async with driver(guest, "i915", "cirrus", [FLEX170]):
        yield


async def drm_node(guest: Guest, card: Card) -> str:
    """The node that the kernel has made for a card."""
    return "/dev/dri/" + await guest.run(f"cd {card.directory}/drm && echo card*")


async def rebind(node: Node, card: Card) -> None:
    """Take NVIDIA's driver from a card and give it back; without it there is no GPU to hand out."""
    await node.guest.run(f"cd /sys/bus/pci/drivers/nvidia && echo {card.address} > unbind")
    await node.shows(NVIDIA)
    await node.guest.run(f"cd /sys/bus/pci/drivers/nvidia && echo {card.address} > bind")
    await node.shows(NVIDIA, UUID)


async def test_gpus_are_nobodys_until_their_drivers_come_and_then_a_pods(node: Node, agent: Log) -> None:
    guest = node.guest
    async with guest.plugged(H100, 0) as h100, guest.plugged(MI210, 1) as mi210, guest.plugged(FLEX170, 2) as flex:
        found = await node.discover()
        assert [resource["devices"] for resource in found["resources"]] == [[], [], []]
        assert {one["device"]: one["why"] for one in found["unclaimed"]} == {
            h100.address: "it has no driver; nvidia is needed",
            mi210.address: "it has no driver; amdgpu is needed",
            flex.address: "it has no driver; i915 or xe is needed",
        }
        assert not any(node.resources[name] for name in (NVIDIA, AMD, INTEL))
        async with nvidia(guest), amdgpu(guest), i915(guest):
            await node.shows(AMD, mi210.address)
            await node.told("add", SUBSYSTEM="drm", DEVNAME="dri/card0")
            await node.shows(INTEL, flex.address)
            await node.told("add", SUBSYSTEM="drm", DEVNAME="dri/card1")
            async with started(guest, h100.address):
                await node.shows(NVIDIA, UUID)
                async with node.pod({NVIDIA: 1, AMD: 1, INTEL: 1}) as pod:
                    assert pod["gets"] == {
                        NVIDIA: {"ids": [UUID], "envs": {"NVIDIA_VISIBLE_DEVICES": UUID}, "nodes": [*NVIDIA_NODES]},
                        AMD: {"ids": [mi210.address], "envs": {}, "nodes": ["/dev/kfd", await drm_node(guest, mi210)]},
                        INTEL: {"ids": [flex.address], "envs": {}, "nodes": [await drm_node(guest, flex)]},
                    }
                    await h100.unplug()
                    await node.shows(NVIDIA, unhealthy=[UUID])
                    await node.told("remove", SUBSYSTEM="pci")
            await node.shows(NVIDIA)
            await agent.says(event="claims-ended")
        await node.shows(AMD)
        await node.shows(INTEL)


async def test_gpus_come_and_go_with_their_drivers_there(node: Node, agent: Log) -> None:
    guest = node.guest
    async with AsyncExitStack() as stack:
        for vendor in (nvidia, amdgpu, i915):
            await stack.enter_async_context(vendor(guest))
        for function, name, told in (
            (H100, NVIDIA, {"SUBSYSTEM": "pci", "DRIVER": "nvidia"}),
            (MI210, AMD, {"SUBSYSTEM": "drm"}),
            (FLEX170, INTEL, {"SUBSYSTEM": "drm"}),
        ):
            async with started(guest, "0000:01:00.0"), guest.plugged(function) as card:
                device = UUID if name == NVIDIA else card.address
                await node.shows(name, device)
                await node.told("bind" if name == NVIDIA else "add", **told)
                await card.unplug()
                await node.shows(name)
                await node.told("remove", SUBSYSTEM="pci")


async def test_an_xid_counts_if_the_kernel_says_it_until_the_driver_comes_anew(node: Node, agent: Log) -> None:
    guest = node.guest
    async with nvidia(guest), guest.plugged(H100) as card, started(guest, card.address):
        await node.shows(NVIDIA, UUID)
        at, since = card.address.removesuffix(".0"), len(agent.lines)
        await guest.run(f"echo '<2>NVRM: Xid (PCI:{at}): 48' > /dev/kmsg")  # as user space may, which is not the kernel
        await kernel_says(guest, f"NVRM: Xid (PCI:{at}): 79")
        await node.shows(NVIDIA, unhealthy=[UUID])
        await agent.says(since, event="device-changed", reason="xid-79")
        assert not agent.said(since, reason="xid-48")
        await rebind(node, card)
        await agent.signal(signal.SIGSTOP)  # and lose lines
        await flood_kernel_log(guest)
        await agent.signal(signal.SIGCONT)
        await agent.says(event="kernel-lines-lost")
        await kernel_says(guest, f"NVRM: Xid (PCI:{at}): 95")
        await node.shows(NVIDIA, unhealthy=[UUID])
        await agent.says(since, event="device-changed", reason="xid-95")
        await rebind(node, card)
