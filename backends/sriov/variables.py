"""Makes the variables by which a container finds its devices, as the sriov-network-device-plugin does; pure.

`PCIDEVICE_<PREFIX>_<NAME>` has the IDs, `…_INFO` JSON as Go's encoding/json writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from backends.base import Device, Grant
from backends.linux import iommu, rdma
from backends.sriov import nodes
from backends.sriov.options import EVERY, SriovOptions, SriovResource

_Info = Mapping[str, str]

_ESCAPES: Final = {ord(it): f"\\u{ord(it):04x}" for it in "<>&\u2028\u2029"}  # as Go's encoder does by default


def of_container(resource: SriovResource, grants: Sequence[Grant]) -> dict[str, str]:
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
    if uio := [path for path in by_path if path.parent == nodes.DEV and path.name.startswith("uio")]:
        yield "uio", {"mount": by_path[uio[0]]}
    if options.rdma:
        yield "rdma", dict(_rdma(device))
    if options.vhost_net and set(nodes.VHOST) <= by_path.keys():
        net, tun = nodes.VHOST
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
