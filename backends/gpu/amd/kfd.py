"""Reads how AMD's compute driver sees the GPUs (KFD topology): which node is which GPU, and how they are linked.

Format: drivers/gpu/drm/amd/amdkfd/kfd_topology.c; one `name value` a line. A node is told by its DRM device: the PCI function
for a GPU or its first partition, a platform device for each other one (amdgpu_xcp.c). `location_id` alone does not tell:
kernels have put the partition's number into its lowest bits, into its highest four, and nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath, Link
from backends.linux import pci, sysfs

TOPOLOGY: Final = HostPath("/sys/class/kfd/kfd/topology/nodes")
DRM: Final = HostPath("/sys/class/drm")

_XGMI: Final = 11  # CRAT_IOLINK_TYPE_XGMI in kfd_crat.h
_LINE: Final = re.compile(r"^([a-z_]{1,40}) (\d{1,20})$", re.MULTILINE)


class KfdNode(Struct, frozen=True):
    """A GPU, or a partition of one, in the topology."""

    number: int
    address: str
    """The address of the GPU."""
    device: HostPath | None
    """What has its DRM nodes: the GPU's PCI function, or a partition's platform device; None if it is not there."""
    model: int
    """The PCI device ID."""
    links: Mapping[int, int]
    """Node number → number of XGMI links to it."""


def gpus(host: Host) -> list[KfdNode]:
    """Every node that is a GPU or a partition, in order; what cannot be read is left out.

    The nodes of a GPU follow each other, its first partition before the others (kgd2kfd_device_init in kfd_device.c).
    """
    numbers = sorted(int(name) for name in sysfs.names(host, TOPOLOGY) if re.fullmatch(r"[0-9]{1,6}", name))
    found, whole = list[KfdNode](), dict[tuple[int, int], str]()
    for number in numbers:
        said = _properties(host, TOPOLOGY / str(number) / "properties")
        minor = said.get("drm_render_minor", 0)
        if not minor or "location_id" not in said:
            continue  # a CPU
        node = sysfs.device(host, DRM / f"renderD{minor}")
        device = node.parent.parent if node else None
        domain, slot = said.get("domain", 0), said["location_id"] >> 3 & 0x1FFF  # bus and device, without the function
        if device is not None and pci.ADDRESS.fullmatch(device.name):
            whole[domain, slot] = device.name
        address = whole.get((domain, slot), f"{domain:04x}:{slot >> 5:02x}:{slot & 0x1F:02x}.0")
        found.append(KfdNode(number, address, device, said.get("device_id", 0), dict(_links(host, number))))
    return found


def links(nodes: Collection[KfdNode]) -> Iterator[Link]:
    """The pairs of GPUs that XGMI joins; partitions of two GPUs are joined as their GPUs are."""
    address = {node.number: node.address for node in nodes}
    pairs: dict[tuple[str, str], int] = {}
    for node in nodes:
        for other, count in node.links.items():
            if other in address and node.address < address[other]:
                pair = node.address, address[other]
                pairs[pair] = max(count, pairs.get(pair, 0))
    for (one, two), count in sorted(pairs.items()):
        yield Link(f"pci:{one}", f"pci:{two}", count)


def _links(host: Host, number: int) -> Iterator[tuple[int, int]]:
    directory = TOPOLOGY / str(number) / "io_links"
    for name in sysfs.names(host, directory):
        said = _properties(host, directory / name / "properties")
        if said.get("type") == _XGMI and "node_to" in said:
            one, all_of_them = said.get("min_bandwidth", 0), said.get("max_bandwidth", 0)
            yield said["node_to"], max(1, all_of_them // one if one else 1)  # the minimum is the bandwidth of one link


def _properties(host: Host, path: HostPath) -> dict[str, int]:
    text = sysfs.attribute(host, path) or ""
    return {name: int(value) for name, value in _LINE.findall(text)}
