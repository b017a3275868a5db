"""Makes mediated devices for pods and removes them, by the parent's `create` and the device's `remove`.

A device of ours has a UUID that follows from its parent, its type and a number: the same after a crash, a reboot or the loss
of all state. So it needs no note of what we made, which could be lost between the making and the noting.
"""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Final

from backends.base import Device, Host, HostPath
from backends.errors import reason_of
from backends.linux import sysfs
from backends.linux.kernel import Kernel
from backends.mdev import parents

NODES: Final = HostPath("/dev/vfio")
MOST: Final = 256
"""Devices of one type that are made of one parent at most: `vfio_ap` says that 65,536 could be."""

_OURS: Final = uuid.UUID("f7fa3a17-5b2e-4c0b-9d53-1d0f6e0c8a41")
_NODE_APPEARS: Final = 2.0  # seconds; devtmpfs has it at once, another /dev when its udev is done
_GONE: Final = (errno.ENOENT, errno.ENODEV, errno.ENXIO)


class CreationError(Exception):
    """It cannot be made, or removed; one sentence."""


@lru_cache(maxsize=1024)
def uuids(parent: str, kind: str) -> tuple[str, ...]:
    """The UUIDs of all devices that we would ever make of a parent (its name) as this type (its ID)."""
    return tuple(str(uuid.uuid5(_OURS, f"{parent} {kind} {number}")) for number in range(MOST))


def could_be_made(parent: str, kind: str, made: Iterable[str], available: int) -> list[str]:
    """The UUIDs of the devices that there is room for."""
    taken = frozenset(made)
    return [one for one in uuids(parent, kind) if one not in taken][:available]


class Maker:
    """Makes and removes on one host."""

    def __init__(self, host: Host, kernel: Kernel) -> None:
        self._host = host
        self._kernel = kernel

    def make(self, devices: Iterable[Device]) -> None:
        """Make those of these devices that are not there yet, or none.

        Raises:
            CreationError: one cannot be made; those that were made are removed again.
        """
        made: list[str] = []
        try:
            for device in devices:
                if self._path(device.key) is None:
                    made.append(device.key)
                    self._make(device)
                self._await_node(device.key)
        except CreationError:
            for one in made:
                with suppress(CreationError):  # the release will see to it
                    self.remove(one)
            raise

    def remove(self, one: str) -> None:
        """Remove a device that we made; another's, and one that is gone, is left as it is.

        Raises:
            CreationError: it is in use, or the kernel refuses.
        """
        path = self._path(one)
        kind = sysfs.linked_name(self._host, path / "mdev_type") if path is not None else None
        if path is None or kind is None or one not in uuids(path.parent.name, kind):
            return
        self._refuse_open(one, path)
        try:
            self._kernel.write(path / "remove", "1")
        except OSError as error:
            if error.errno not in _GONE:
                raise CreationError(f"mediated device {one} cannot be removed: {reason_of(error)}") from error

    def _path(self, one: str) -> HostPath | None:
        return sysfs.device(self._host, parents.MADE / one)

    def _make(self, device: Device) -> None:
        (kind,) = device.attributes["type_id"]
        parent = parents.of(self._host, device.unit)
        if parent is None:
            raise CreationError(f"{device.unit} has no mediated devices any more")
        if not parents.available(self._host, parent, kind):  # it shrinks when another type is made of the same parent
            raise CreationError(f"{device.unit} has no room for one more {kind} (available_instances is 0)")
        try:
            self._kernel.write(parent / parents.TYPES / kind / "create", device.key)
        except OSError as error:
            raise CreationError(f"the kernel makes no {kind} of {device.unit}: {reason_of(error)}") from error

    def _node(self, one: str) -> HostPath | None:
        path = self._path(one)
        group = sysfs.linked_name(self._host, path / "iommu_group") if path is not None else None
        return None if group is None else NODES / group

    def _await_node(self, one: str) -> None:
        def is_there() -> bool:
            node = self._node(one)
            return node is not None and self._host.local(node).exists()

        if not self._kernel.wait(is_there, _NODE_APPEARS):
            raise CreationError(f"mediated device {one} was made and has no node in {NODES}: is vfio_mdev loaded?")

    def _refuse_open(self, one: str, path: HostPath) -> None:
        """A group's node can be open once at a time (vfio_group_fops_open): to remove an open one would wait, or hurt."""
        group = sysfs.linked_name(self._host, path / "iommu_group")
        if group is None:
            return
        try:
            self._kernel.try_open(NODES / group)
        except OSError as error:
            if error.errno not in _GONE:
                raise CreationError(
                    f"mediated device {one} is not removed while {NODES / group} is in use: {reason_of(error)}"
                ) from error
