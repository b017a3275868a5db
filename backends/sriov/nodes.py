"""Finds the nodes that a container needs for a function: of vfio, uio, RDMA, vhost-net and vDPA."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath, Node
from backends.linux import iommu, pci, rdma, sysfs
from backends.sriov.options import Vdpa

DEV: Final = HostPath("/dev")
VHOST: Final = (DEV / "vhost-net", DEV / "net/tun")

_UIO: Final = frozenset({"uio", "igb_uio", "uio_pci_generic"})
_VDPA: Final = HostPath("/sys/bus/vdpa/devices")
_VDPA_DRIVERS: Final[dict[str, Vdpa]] = {"virtio_vdpa": "virtio", "vhost_vdpa": "vhost"}
_VHOST_VDPA: Final = re.compile(r"vhost-vdpa-[0-9]+")


class VdpaDevice(Struct, frozen=True):
    """A vDPA device of a function."""

    name: str
    """`vdpa0`, or the name given to `vdpa dev add`."""
    kind: Vdpa
    nodes: tuple[Node, ...]
    """Its node, if `vhost_vdpa` drives it."""


def of_function(host: Host, function: pci.Function) -> Iterator[Node]:
    """The nodes that its driver makes."""
    if iommu.is_vfio(function) and function.iommu_group is not None:
        group = function.iommu_group
        on_host = f"noiommu-{group}" if iommu.is_noiommu_group(host, group) else group
        yield _node(iommu.NODES / "vfio", shared=True)
        yield Node(iommu.NODES / on_host, (iommu.NODES / group).text, "rw")
    elif function.driver in _UIO:
        yield from (_node(DEV / name) for name in sysfs.names(host, function.path / "uio")[:1])


def of_rdma(host: Host, adapter: rdma.Adapter) -> Iterator[Node]:
    """The nodes of every port of an adapter, and that of the connection manager."""
    yield from (_node(node.path) for node in adapter.nodes)
    if host.local(rdma.RDMA_CM).exists():
        yield _node(rdma.RDMA_CM, shared=True)


def of_vhost(host: Host) -> Iterator[Node]:
    """The nodes of vhost-net and tun: both, or none."""
    if all(host.local(path).exists() for path in VHOST):
        yield from (_node(path, shared=True) for path in VHOST)


def vdpa(host: Host, function: pci.Function) -> VdpaDevice | None:
    """The function's first vDPA device that has a driver."""
    for name in sysfs.names(host, _VDPA):
        path = sysfs.device(host, _VDPA / name)
        if path is None or path.parent != function.path:
            continue
        kind = _VDPA_DRIVERS.get(sysfs.linked_name(host, path / "driver") or "")
        nodes = [_node(DEV / it) for it in sysfs.names(host, path) if _VHOST_VDPA.fullmatch(it)]
        if kind is not None:
            return VdpaDevice(name, kind, tuple(nodes[:1]))
    return None


def _node(path: HostPath, *, shared: bool = False) -> Node:
    return Node(path, path.text, "rw", shared)
