"""Reads from sysfs which devices can be divided, into which types, and what was made of them.

A parent is any device: a PCI function (NVIDIA, i915), a virtual one (`mtty`), s390's `matrix`.
Files: Documentation/driver-api/vfio-mediated-device.rst, Documentation/ABI/testing/sysfs-bus-vfio-mdev.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath
from backends.linux import sysfs

MADE: Final = HostPath("/sys/bus/mdev/devices")
PARENTS: Final = HostPath("/sys/class/mdev_bus")
TYPES: Final = "mdev_supported_types"

UUID: Final = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""As the kernel names a mediated device (`%pUl` in drivers/vfio/mdev/mdev_core.c)."""


class Type(Struct, frozen=True):
    """What a parent can be divided into."""

    id: str
    """The driver's own name for it: `nvidia-222`."""
    name: str
    """The driver's name with `_` for each space, as in KubeVirt (`GRID_T4-1Q`); the ID if it has no name."""


def every(host: Host) -> dict[str, HostPath]:
    """Name → path of every parent.

    Raises:
        OSError: they cannot be listed.
    """
    links = [*(PARENTS / name for name in sysfs.entries(host, PARENTS))]
    found = {link.name: path for link in links if (path := sysfs.device(host, link)) is not None}
    for name in sysfs.entries(host, MADE):
        if (path := sysfs.device(host, MADE / name)) is not None:
            found.setdefault(path.parent.name, path.parent)
    return found


def of(host: Host, name: str) -> HostPath | None:
    """The path of one parent; None if there is none.

    Raises:
        OSError: they cannot be listed.
    """
    return sysfs.device(host, PARENTS / name) or every(host).get(name)


def made(host: Host, parent: HostPath) -> list[str]:
    """The UUIDs of the devices that were made of a parent.

    Raises:
        OSError: they cannot be listed.
    """
    return [name for name in sysfs.entries(host, parent) if UUID.fullmatch(name)]


def types(host: Host, parent: HostPath) -> list[Type]:
    """What a parent can be divided into.

    Raises:
        OSError: they cannot be listed.
    """
    return [read_type(host, parent, kind) for kind in sysfs.entries(host, parent / TYPES)]


def available(host: Host, parent: HostPath, kind: str) -> int:
    """How many more of a type could be made of a parent now; it shrinks as others are made."""
    return max(sysfs.number(host, parent / TYPES / kind / "available_instances") or 0, 0)


def type_of(host: Host, device: HostPath) -> Type | None:
    """The type of a device that was made; None if it cannot be told."""
    kind = sysfs.linked_name(host, device / "mdev_type")
    return None if kind is None else read_type(host, device.parent, kind)


def read_type(host: Host, parent: HostPath, kind: str) -> Type:
    """One type of a parent, by its ID."""
    name = sysfs.attribute(host, parent / TYPES / kind / "name") or ""
    return Type(kind, name.replace(" ", "_") if name.isprintable() and name else kind)
