"""Takes the README's picture of the live page: `.venv/bin/python -m tests.console.http.screenshot docs/images/page.png`,
as root.

A real daemon serves it. Its hardware is made up, in trees of files: eight GPUs and eight adapters, one of each below a
switch, serial adapters, kvm; its pods are a simulated kubelet's. One GPU falls off its bus, one port has no link, one GPU
is drained.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from playwright.async_api import async_playwright, expect

from agent.simulation.model import Container, Pod
from tests.backends import machines, rdma_trees
from tests.backends.trees import plant
from tests.console.http.browsing import MILLISECONDS
from tests.console.http.serving import free_port
from tests.e2e.kmsg import KernelLog
from tests.e2e.node import Node, chardev
from tests.e2e.process import finish
from tests.needs import CHROMIUM

GPU: Final = "nvidia.com/gpu"
HCA: Final = "rdma/hca"
KVM: Final = "devices.kubevirt.io/kvm"
PODS: Final = (
    ("training", "llama-0", {GPU: 2, HCA: 2}),
    ("training", "llama-1", {GPU: 2, HCA: 2}),
    ("research", "notebook-7d9f", {GPU: 1}),
    ("vms", "virt-launcher-web", {KVM: 1}),
    ("lab", "scanner", {"example.com/serial": 1}),
)
CONFIG: Final = f"""
[[resource]]
name = "{GPU}"
backend = "gpu"
select = {{ vendor = "10de" }}

[[resource]]
name = "{HCA}"
backend = "infiniband"
"""
WIDTH, HEIGHT = 1240, 860  # what GitHub shows of a picture, and more


def machine() -> str:
    """Eight H100, each with a ConnectX-7 below its switch."""
    text = machines.hgx_h100() + rdma_trees.RDMA_CM + "dev/kvm c 10:232\ndev/ttyUSB0 c 188:0\ndev/ttyUSB1 c 188:1\n"
    for number, place in enumerate(machines.H100):
        bus = place[:2]
        text += rdma_trees.adapter(
            f"mlx5_{number}",
            f"0000:{int(bus, 16) + 1:02x}:00.0",
            [rdma_trees.DOWN] if number == 6 else [rdma_trees.PortTree()],
            below=f"pci0000:{bus}/0000:{bus}:01.0",
            number=number,
            guid=f"b83f:d203:00a1:000{number}",
            numa_node=number // 4,
        )
    return text


async def take(picture: Path, root: Path) -> None:
    """Let it all happen, and take the picture."""
    node, port = Node(root), free_port()
    plant(root, machine())
    served = f'[http]\nlisten = "127.0.0.1:{port}"\n'
    resources = (served, CONFIG, chardev("/dev/kvm", KVM, 100), chardev("/dev/ttyUSB*", "example.com/serial"))
    trees = {name: str(root / name) for name in ("sys", "proc")}
    environment = {"NODE_NAME": "gpu-17"}
    with KernelLog(node.dev / "kmsg") as log:
        async with node.kubelet, node.agent(*resources, environment=environment, probe="1s", **trees):
            for namespace, name, wanted in PODS:
                status = await node.admit(Pod(name, (Container("main", wanted),), namespace=namespace))
                assert status.phase == "Running", status
            config = str(root / "config.toml")
            drained = await finish("drain", "nvidia7", "--reason", "new riser", "--config", config)
            assert drained[0] == 0, drained
            log.say("NVRM: Xid (PCI:0000:4c:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
            async with async_playwright() as playwright:
                chromium = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
                expect.set_options(timeout=MILLISECONDS)
                page = await chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
                await page.goto(f"http://127.0.0.1:{port}/")
                await expect(page.locator("#attention")).to_contain_text("xid-79")
                await expect(page.locator("#attention")).to_contain_text("drained")
                await expect(page.locator("#attention")).to_contain_text("port-down")
                await page.screenshot(path=picture)
                await chromium.close()


if __name__ == "__main__":
    if len(sys.argv) != 2 or os.geteuid() != 0:
        sys.exit(f"usage, as root: {sys.executable} -m tests.console.http.screenshot PICTURE.png")
    with TemporaryDirectory(dir="/tmp") as directory:
        asyncio.run(take(Path(sys.argv[1]).absolute(), Path(directory)))
