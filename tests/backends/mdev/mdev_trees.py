"""Writes mediated devices as lines of a fixture tree (see trees.py), as a kernel lays them out in sysfs."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.base import Device, Resource, ResourceSpec, Selector
from backends.mdev import Mdev, MdevOptions, MdevResource
from tests.backends.pci_trees import function
from tests.backends.trees import planted_host

FIRST, SECOND = "4b20d080-1b54-4048-85b3-a6a62d165c01", "8b2b6d2c-9ab2-4f0e-9d3c-0d3c5b7f2a02"
T4, OTHER_T4 = "0000:3b:00.0", "0000:5e:00.0"
T4_TYPES = {"nvidia-222": ("GRID T4-1B", 16), "nvidia-230": ("GRID T4-1Q", 16), "nvidia-234": ("GRID T4-16Q", 1)}

VFIO = "dev/vfio/vfio c 10:196\n"


def parent(path: str, types: Mapping[str, tuple[str, int]]) -> str:
    """What makes a device below sys/devices a parent: each type by its ID with its name ("": none), and how many more."""
    lines = [f"sys/class/mdev_bus/{posixpath.basename(path)} -> ../../devices/{path}"]
    for kind, (name, available) in types.items():
        at = f"sys/devices/{path}/mdev_supported_types/{kind}"
        lines += [f"{at}/create = ", f"{at}/devices/", f"{at}/device_api = vfio-pci"]
        lines += [f"{at}/available_instances = {available}", *([f"{at}/name = {name}"] if name else [])]
    return "\n".join(lines) + "\n"


def made(path: str, uuid: str, kind: str, group: int | None) -> str:
    """A mediated device of a parent below sys/devices."""
    at = f"sys/devices/{path}/{uuid}"
    up = posixpath.relpath("sys", at)
    lines = [
        f"sys/bus/mdev/devices/{uuid} -> ../../../devices/{path}/{uuid}",
        f"{at}/mdev_type -> ../mdev_supported_types/{kind}",
        f"{at}/remove = ",
        f"sys/devices/{path}/mdev_supported_types/{kind}/devices/{uuid} -> ../../../{uuid}",
    ]
    if group is not None:
        lines += [
            f"{at}/iommu_group -> {up}/kernel/iommu_groups/{group}",
            f"sys/kernel/iommu_groups/{group}/devices/{uuid} -> ../../../../devices/{path}/{uuid}",
            f"dev/vfio/{group} c 240:{group}",
        ]
    return "\n".join(lines) + "\n"


T4_BELOW = "pci0000:3a/0000:3a:00.0"
T4_PATH = f"{T4_BELOW}/{T4}"
I915_PATH, MTTY_PATH, MATRIX_PATH = "pci0000:00/0000:00:02.0", "virtual/mtty/mtty", "vfio_ap/matrix"


def t4(numa_node: int | None = 0, available: int | None = None) -> str:
    """A Tesla T4 whose driver makes vGPUs."""
    types = {kind: (name, most if available is None else available) for kind, (name, most) in T4_TYPES.items()}
    card = function(T4, "10de:1eb8", below=T4_BELOW, driver="nvidia", numa_node=numa_node, group=12)
    return card + parent(T4_PATH, types)


def i915() -> str:
    """An Intel GPU with GVT-g; its types have no names."""
    card = function("0000:00:02.0", "8086:3e92", kind="030000", driver="i915", numa_node=-1, group=1)
    return card + parent(I915_PATH, {"i915-GVTg_V5_4": ("", 1), "i915-GVTg_V5_8": ("", 2)})


def mtty() -> str:
    """The kernel's sample: serial ports that are on no bus at all."""
    return parent(MTTY_PATH, {"mtty-1": ("Single port serial", 24), "mtty-2": ("Dual port serial", 12)})


def vfio_ap() -> str:
    """s390's crypto cards, whose parent is `matrix`."""
    types = {"vfio_ap-passthrough": ("VFIO AP Passthrough Device", 65536)}
    return parent(MATRIX_PATH, types)


def resource(name: str = "nvidia.com/GRID_T4-1Q", *select: Selector, **options: Any) -> MdevResource:
    return Resource(name, ResourceSpec("mdev", MdevOptions(**options), select=select or ({"type": ("GRID T4-1Q",)},)))


def backend(root: Path, tree: str, *resources: MdevResource) -> Mdev:
    return Mdev(planted_host(root, VFIO + tree), resources or (resource(),))


def devices(found: Mdev) -> list[Device]:
    return [device for unit in found.units() for device in found.discover(unit).devices]


def only(found: Mdev) -> Device:
    (device,) = devices(found)
    return device
