"""Nodes with PCI functions in IOMMU groups, and a kernel that binds their drivers: it acts on what is written to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from backends.base import Device, Grant, Host, HostPath, Resource, ResourceSpec, Selector
from backends.linux import pci, sysfs
from backends.linux.kernel import Kernel
from backends.vfio import Vfio, VfioOptions, VfioResource
from tests.backends.pci_trees import function
from tests.backends.trees import plant, planted_host
from tests.nodes import make_node

GPU, SOUND = "0000:3b:00.0", "0000:3b:00.1"
ROOT = "pci0000:3a/0000:3a:00.0"
T4 = {"id": ("10DE:1EB8",)}

BUS = """
sys/bus/pci/drivers_probe =
sys/module/vfio_pci/
sys/bus/pci/drivers/vfio-pci/
proc/1/mountinfo = 22 1 0:21 / / rw - overlay overlay rw
proc/1/net/route = Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
dev/vfio/vfio c 10:196
"""


def resource(name: str = "nvidia.com/T4", *select: Selector, **options: Any) -> VfioResource:
    return Resource(name, ResourceSpec("vfio", VfioOptions(**options), select=select or (T4,)))


def gpu(driver: str | None = "vfio-pci", group: int | None = 12, **more: Any) -> str:
    """A graphics card's first function, in a group."""
    files = {"driver_override": "(null)", **more.pop("files", {})}
    bound = driver is not None and driver.endswith("vfio-pci")
    tree = function(GPU, "10de:1eb8", below=ROOT, driver=driver, group=group, files=files, **more)
    return tree + (own_node(GPU, 0) + f"dev/vfio/{group} c 240:{group}\n" if bound else "")


def sound(driver: str | None = "vfio-pci", group: int | None = 12, **more: Any) -> str:
    """Its companion."""
    files = {"driver_override": "(null)", **more.pop("files", {})}
    tree = function(SOUND, "10de:10f8", below=ROOT, kind="040300", driver=driver, group=group, files=files, **more)
    return tree + (own_node(SOUND, 1) if driver == "vfio-pci" else "")


def own_node(address: str, number: int, below: str = ROOT, cdev: bool = False) -> str:
    path = f"sys/devices/{below}/{address}/vfio-dev/vfio{number}"
    return f"{path}/\n" + (f"{path}/dev = 511:{number}\ndev/vfio/devices/vfio{number} c 511:{number}\n" if cdev else "")


def backend(root: Path, tree: str, *resources: VfioResource, kernel: Kernel | None = None) -> Vfio:
    return Vfio(planted_host(root, BUS + tree), resources or (resource(),), kernel)


def devices(found: Vfio) -> list[Device]:
    return [device for unit in found.units() for device in found.discover(unit).devices]


def only(found: Vfio) -> Device:
    (device,) = devices(found)
    return device


def grant(device: Device) -> Grant:
    return Grant(device.key, device)


class ActingKernel(Kernel):
    """Answers what is written to sysfs as a kernel does, in a tree that it changes."""

    def __init__(self, host: Host, native: Mapping[str, str] | None = None, *, cdev: bool = False) -> None:
        super().__init__(host)
        self.host = host
        self.native = dict(native or {})
        self.cdev = cdev
        self.written: list[tuple[str, str]] = []
        self.loaded: list[str] = []
        self.refuses: Callable[[HostPath, str], OSError | None] = lambda _path, _text: None
        self.deaf: set[str] = set()
        """Functions that vfio-pci will not take."""
        self.waited = 0

    def write(self, path: HostPath, text: str) -> None:
        self.written.append((path.text, text))
        if (error := self.refuses(path, text)) is not None:
            raise error
        super().write(path, text)
        if path.name == "driver_override":
            self.host.local(path).write_text((text.strip() or "(null)") + "\n")
        elif path.name == "unbind":
            self._unbind(text)
        elif path.name == "drivers_probe":
            self._probe(text)

    def load(self, module: str) -> None:
        self.loaded.append(module)
        self.host.local(HostPath("/sys/bus/pci/drivers/vfio-pci")).mkdir(parents=True)

    def wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        self.waited += 1
        return is_so()

    def _unbind(self, address: str) -> None:
        found = pci.read(self.host, address)
        assert found is not None
        self.host.local(found.path / "driver").unlink()
        for name in found.vfio:
            self._remove_own_node(found, name)
        if not self._others_on_vfio(found):
            self.host.local(HostPath(f"/dev/vfio/{found.iommu_group}")).unlink(missing_ok=True)

    def _remove_own_node(self, found: pci.Function, name: str) -> None:
        directory = self.host.local(found.path / "vfio-dev")
        (directory / name / "dev").unlink(missing_ok=True)
        (directory / name).rmdir()
        directory.rmdir()
        self.host.local(HostPath(f"/dev/vfio/devices/{name}")).unlink(missing_ok=True)

    def _others_on_vfio(self, found: pci.Function) -> bool:
        members = sysfs.entries(self.host, HostPath(f"/sys/kernel/iommu_groups/{found.iommu_group}/devices"))
        others = (pci.read(self.host, name) for name in members if name != found.address)
        return any(other is not None and other.vfio for other in others)

    def _probe(self, address: str) -> None:
        found = pci.read(self.host, address)
        assert found is not None
        driver = pci.driver_override(self.host, address) or self.native.get(address)
        if found.driver is not None or driver is None or (driver == "vfio-pci" and address in self.deaf):
            return
        path = found.path.text.removeprefix("/")
        up = os.path.relpath("sys", path)
        plant(self.host.root, f"{path}/driver -> {up}/bus/pci/drivers/{driver}")
        plant(self.host.root, f"sys/bus/pci/drivers/{driver}/unbind =")
        if driver == "vfio-pci":
            self._make_nodes(found, path)

    def _make_nodes(self, found: pci.Function, path: str) -> None:
        taken = [int(entry.name[4:]) for entry in self.host.sys.rglob("vfio-dev/vfio*")]
        number = max(taken, default=6) + 1
        plant(self.host.root, f"{path}/vfio-dev/vfio{number}/")
        if self.cdev:
            plant(self.host.root, f"{path}/vfio-dev/vfio{number}/dev = 511:{number}")
            plant(self.host.root, f"dev/vfio/devices/vfio{number} c 511:{number}")
        if found.iommu_group is None:
            self._make_group(found, path)
            return
        node = self.host.dev / "vfio" / found.iommu_group
        if not node.exists():
            node.parent.mkdir(exist_ok=True)
            make_node(node, "c", 240, int(found.iommu_group))

    def _make_group(self, found: pci.Function, path: str) -> None:
        """One that is made up for a function without an IOMMU."""
        groups, up = "sys/kernel/iommu_groups", os.path.relpath("sys", path)
        plant(
            self.host.root,
            f"{groups}/0/name = vfio-noiommu\n"
            f"{groups}/0/devices/{found.address} -> ../../../../{path.removeprefix('sys/')}\n"
            f"{path}/iommu_group -> {up}/kernel/iommu_groups/0\n"
            "dev/vfio/noiommu-0 c 240:0\n",
        )


def acting(root: Path, tree: str, *resources: VfioResource, **native: str) -> tuple[Vfio, ActingKernel]:
    """A node whose kernel acts; `native` drivers by the letters `gpu` and `sound`."""
    host = planted_host(root, BUS + tree)
    addresses = {"gpu": GPU, "sound": SOUND}
    kernel = ActingKernel(host, {addresses[name]: driver for name, driver in native.items()})
    return Vfio(host, resources or (resource(bind="allocate"),), kernel), kernel
