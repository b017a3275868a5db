"""Says which hardware stands behind a device node, under names that outlast a boot: what it is, and where.

A node's name and number go to whatever comes next: pull one adapter, plug in another, and that is /dev/ttyUSB0, c:188:0.
/sys/dev/char and /sys/dev/block lead from the number to the device (Documentation/ABI/testing/sysfs-dev). Above it is the stick,
the PCI function or the platform device that it is a part of. Of a node that is nothing but software (/dev/kvm, loop, dm)
nothing is known here, and its number is all there is.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath
from backends.linux import sysfs, usb
from backends.linux.nodes import DeviceNode
from backends.linux.pci import functions as pci

_NVIDIA: Final = HostPath("/proc/driver/nvidia/gpus")
_NVIDIA_MAJOR: Final = 195
"""Of /dev/nvidia0 and so on (Documentation/admin-guide/devices.txt). Their driver makes no devices in sysfs; their numbers
follow the order in which it finds the GPUs."""
_SOFTWARE: Final = "/sys/devices/virtual/"
_DISKS: Final = f"{_SOFTWARE}nvme-subsystem/"
"""Where disks are that several NVMe controllers may lead to, as most of servers are (drivers/nvme/host/multipath.c)."""
_SCSI_HOST: Final = re.compile(r"host\d+")
_OWN_IDS: Final = ("wwid", "cid", "serial", "unique_id")
"""Attributes that tell one piece from another of its model: of disks and NVMe namespaces (drivers/scsi/scsi_sysfs.c,
drivers/nvme/host/sysfs.c), memory cards (drivers/mmc/core/mmc.c), NVMe controllers, and AMD's GPUs (amdgpu_pm.c)."""
_PARTS: Final = ("name", "index", "port_number", "partition", "nsid")
"""Attributes that tell one part of a piece from another: of I2C adapters, cameras (video4linux), ports of a serial
adapter (drivers/usb/serial/bus.c), partitions, NVMe namespaces."""


class Behind(Struct, frozen=True):
    """What stands behind a node, as far as sysfs tells."""

    identity: str = ""
    """Its IDs, its serial, and which part of it the node is: `0403:6001:A50285BI 1.0`; empty if nothing is known."""
    place: frozenset[str] = frozenset()
    """As `Device.place`: the USB port, the PCI function or the platform device; of a disk behind a SCSI host, or several NVMe controllers, itself."""


def behind(host: Host, node: DeviceNode) -> Behind:
    """What stands behind a node."""
    link = f"/sys/dev/{'block' if node.block else 'char'}/{node.major}:{node.minor}"
    path = sysfs.device(host, HostPath(link))
    if path is None and node.major == _NVIDIA_MAJOR and not node.block:
        return _nvidia(host, node.minor)
    if path is None or (path.text.startswith(_SOFTWARE) and not path.text.startswith(_DISKS)):
        return Behind()
    own: list[str] = []
    parts: list[str] = []
    disk = False
    for up in sysfs.above(path):
        if usb.is_port(up.name):
            return Behind(" ".join((usb.identity(host, up), *own, *parts)), usb.places(host, up))
        names = frozenset(sysfs.names(host, up))
        own += [] if own else [f"{it}={text}" for it in _OWN_IDS if it in names and (text := _text(host, up / it))][:1]
        if pci.ADDRESS.fullmatch(up.name):
            place = frozenset((f"pci:{up.name}",)) if not disk else frozenset(own)
            return Behind(" ".join((pci.identity(host, up), *own, *parts)), place)
        if sysfs.linked_name(host, up / "subsystem") == "platform":
            place = frozenset((f"platform:{up.name}",)) if not disk else frozenset(own)
            return Behind(" ".join((up.name, *own, *parts)), place)
        parts += (text for it in _PARTS if it in names and (text := _text(host, up / it)))
        parts += (up.name.partition(":")[2],) if usb.is_interface(up.name) else ()
        disk = disk or _SCSI_HOST.fullmatch(up.name) is not None
    return Behind(" ".join((*own, *parts)), frozenset(own)) if own and path.text.startswith(_DISKS) else Behind()


def _nvidia(host: Host, minor: int) -> Behind:
    """The GPU with this minor number, by what its driver says in /proc."""
    for address in sysfs.names(host, _NVIDIA):
        lines = (sysfs.text(host, _NVIDIA / address / "information") or "").splitlines()
        said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if said.get("Device Minor") == str(minor):
            function = sysfs.device(host, pci.FUNCTIONS / address)  # its UUID is unknown until it is used first
            return Behind(pci.identity(host, function) if function else "", frozenset((f"pci:{address}",)))
    return Behind()


def _text(host: Host, path: HostPath) -> str:
    text = sysfs.attribute(host, path) or ""
    return text if text.isprintable() else ""
