"""What a container gets of a function: the nodes of vfio, uio, RDMA, vhost-net and vDPA, and the variables that tell of them.

As the sriov-network-device-plugin does: `PCIDEVICE_<PREFIX>_<NAME>` has the IDs, `…_INFO` JSON as Go's encoding/json writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from backends.base import Device, Grant, Host, HostPath, Node
from backends.linux import iommu, pci, rdma, sysfs
from backends.sriov.options import EVERY, SriovOptions, SriovResource, Vdpa

# --- nodes ---


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


def nodes_of(host: Host, function: pci.Function) -> Iterator[Node]:
    """The nodes that its driver makes."""
    if iommu.is_vfio(function) and function.iommu_group is not None:
        group = function.iommu_group
        on_host = f"noiommu-{group}" if iommu.is_noiommu_group(host, group) else group
        yield _node(iommu.NODES / "vfio", shared=True)
        yield Node(iommu.NODES / on_host, (iommu.NODES / group).text, "rw")
    elif function.driver in _UIO:
        yield from (_node(DEV / name) for name in sysfs.names(host, function.path / "uio")[:1])


def rdma_nodes(host: Host, adapter: rdma.Adapter) -> Iterator[Node]:
    """The nodes of every port of an adapter, and that of the connection manager."""
    yield from (_node(node.path) for node in adapter.nodes)
    if host.local(rdma.RDMA_CM).exists():
        yield _node(rdma.RDMA_CM, shared=True)


def vhost_nodes(host: Host) -> Iterator[Node]:
    """The nodes of vhost-net and tun: both, or none."""
    if all(host.local(path).exists() for path in VHOST):
        yield from (_node(path, shared=True) for path in VHOST)


def vdpa_device(host: Host, function: pci.Function) -> VdpaDevice | None:
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


# --- variables ---


_Info = Mapping[str, str]

_ESCAPES: Final = {ord(it): f"\\u{ord(it):04x}" for it in "<>&\u2028\u2029"}  # as Go's encoder does by default


def variables(resource: SriovResource, grants: Sequence[Grant]) -> dict[str, str]:
    """The two variables, with the devices in the order of their IDs."""
    name = resource.variable("PCIDEVICE")
    devices = list(dict.fromkeys(grant.device.key for grant in grants))
    info = {grant.device.key: dict(_info(grant.device, resource.spec.options)) for grant in grants}
    text = json.dumps(info, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
    return {name: ",".join(devices), f"{name}_INFO": text.translate(_ESCAPES)}


def _info(device: Device, options: SriovOptions) -> Iterator[tuple[str, _Info]]:
    """The parts of the JSON about one device."""
    yield "generic", {"deviceID": device.key}
    by_path = {node.path: node.container_path for node in device.nodes}
    groups = [path for path in by_path if path.parent == iommu.NODES and path.name != "vfio"]
    if groups:
        yield "vfio", {"mount": by_path[iommu.NODES / "vfio"], "dev-mount": by_path[groups[0]]}
    if uio := [path for path in by_path if path.parent == DEV and path.name.startswith("uio")]:
        yield "uio", {"mount": by_path[uio[0]]}
    if options.rdma:
        yield "rdma", dict(_rdma(device))
    if options.vhost_net and set(VHOST) <= by_path.keys():
        net, tun = VHOST
        yield "vhost", {"net-mount": by_path[net], "tun-mount": by_path[tun]}
    if options.vdpa is not None:
        own = [container for path, container in by_path.items() if path.name.startswith("vhost-vdpa-")]
        yield "vdpa", {"mount": own[0]} if own else {}
    if options.additional_info:
        yield "extra", {**options.additional_info.get(EVERY, {}), **options.additional_info.get(device.key, {})}


def _rdma(device: Device) -> Iterator[tuple[str, str]]:
    """The last node of each kind: a container that wants the others finds them in its /dev."""
    for node in device.nodes:
        if node.path.parent == rdma.NODES:
            yield node.path.name.rstrip("0123456789"), node.container_path
    if names := device.attributes.get("hca"):
        yield "rdma_dev", names[0]
