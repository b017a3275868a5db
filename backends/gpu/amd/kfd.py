"""Reads how AMD's compute driver sees the GPUs (KFD topology): which node is which GPU, and how they are linked.

Format: drivers/gpu/drm/amd/amdkfd/kfd_topology.c; one `name value` a line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath, Link
from backends.linux import sysfs

TOPOLOGY: Final = HostPath("/sys/class/kfd/kfd/topology/nodes")

_XGMI: Final = 11  # CRAT_IOLINK_TYPE_XGMI in kfd_crat.h
_LINE: Final = re.compile(r"^([a-z_]{1,40}) (\d{1,20})$", re.MULTILINE)


class KfdNode(Struct, frozen=True):
    """A GPU, or a partition of one, in the topology."""

    number: int
    address: str
    """The address of the GPU."""
    render_minor: int
    """Of /dev/dri/renderD<minor>."""
    links: Mapping[int, int]
    """Node number → number of XGMI links to it."""


def gpus(host: Host) -> list[KfdNode]:
    """Every node that is a GPU or a partition; what cannot be read is left out."""
    found = (_node(host, int(name)) for name in sysfs.names(host, TOPOLOGY) if re.fullmatch(r"[0-9]{1,6}", name))
    return [node for node in found if node is not None]


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


def _node(host: Host, number: int) -> KfdNode | None:
    said = _properties(host, TOPOLOGY / str(number) / "properties")
    render, place = (
        said.get("drm_render_minor", 0),
        said.get("location_id", 0) & 0xFFFF,
    )  # the bits above are the partition
    if not render or "location_id" not in said:
        return None  # a CPU
    gpu = f"{said.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
    return KfdNode(number, gpu, render, dict(_links(host, number)))


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
