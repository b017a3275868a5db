"""Writes and removes the files that tell Multus and CNI plugins which network device a pod has.

Format and place: Device Information Specification 1.1.0 of the Network Plumbing Working Group, and
`GetDPDeviceInfoFile` of its network-attachment-definition-client.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from backends.base import AllocationRefused, Host, HostPath, Released
from backends.errors import reason_of
from backends.linux import files

DIRECTORY: Final = HostPath("/run/k8s.cni.cncf.io/devinfo/dp")

_VERSION: Final = "1.1.0"


Info = Mapping[str, object]
"""The content of one file."""


def pci(address: str, rdma: Sequence[str] = ()) -> Info:
    """The content for a PCI function; `rdma` are its RDMA devices."""
    more = {"rdma-device": ",".join(rdma)} if rdma else {}
    return {"type": "pci", "version": _VERSION, "pci": {"pci-address": address, **more}}


def vdpa(address: str, parent: str, driver: str, path: str) -> Info:
    """The content for a vDPA device: `vdpa0`, `vhost` or `virtio`, and the node of the former."""
    more = {"path": path} if path else {}
    return {
        "type": "vdpa",
        "version": _VERSION,
        "vdpa": {"parent-device": parent, "driver": driver, **more, "pci-address": address},
    }


def write(host: Host, resource: str, device_id: str, info: Info) -> None:
    """Write one device's file, in place of an earlier one.

    Raises:
        AllocationRefused: it cannot be written.
    """
    path = file_of(resource, device_id)
    try:
        host.local(DIRECTORY).mkdir(mode=0o755, parents=True, exist_ok=True)
        files.replace(host.local(path), json.dumps(info, separators=(",", ":")).encode(), 0o644)
    except OSError as error:
        raise AllocationRefused(
            f"{path}, by which CNI plugins know {device_id} of {resource}, cannot be written: {reason_of(error)}. Ask this "
            "node's administrator to let Fairlead write there, or to set device_info = false."
        ) from error


def remove(host: Host, ended: Iterable[Released]) -> None:
    """Remove the files of devices that no pod holds any more.

    Raises:
        OSError: one cannot be removed.
    """
    for one in ended:
        host.local(file_of(one.resource, one.id)).unlink(missing_ok=True)


def file_of(resource: str, device_id: str) -> HostPath:
    """The path of the file for a device."""
    return DIRECTORY / f"{resource}-{device_id}-device.json".replace("/", "-")
