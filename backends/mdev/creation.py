"""Makes mediated devices for pods and removes them, by the parent's `create` and the device's `remove`.

The UUID of a device of ours is computed from its parent, its type and a number, and so the same after a crash, a reboot or the
loss of all state. No note of what we made is needed, which could be lost before it is written.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Final

from backends.base import Device, Host, HostPath, NotReady
from backends.errors import reason_of
from backends.linux import iommu, sysfs
from backends.linux.kernel import GONE, Kernel, explained
from backends.mdev import parents

MOST: Final = 256
"""The most devices of one type that are made of one parent: `vfio_ap` would allow 65,536."""

_OURS: Final = uuid.UUID("f7fa3a17-5b2e-4c0b-9d53-1d0f6e0c8a41")
_NODE_APPEARS: Final = 2.0  # seconds; devtmpfs has it at once, another /dev when its udev is done


@lru_cache(maxsize=1024)
def uuids(parent: str, kind: str) -> tuple[str, ...]:
    """The UUIDs of all devices that we may ever make of a parent (its name) with this type (its ID)."""
    return tuple(str(uuid.uuid5(_OURS, f"{parent} {kind} {number}")) for number in range(MOST))


def could_be_made(parent: str, kind: str, made: Iterable[str], available: int) -> list[str]:
    """The UUIDs of the devices that there is room for."""
    taken = frozenset(made)
    return [one for one in uuids(parent, kind) if one not in taken][:available]


class Maker:
    """Makes and removes devices on one host."""

    def __init__(self, host: Host, kernel: Kernel) -> None:
        self._host = host
        self._kernel = kernel

    def make(self, devices: Iterable[Device]) -> None:
        """Make those of these devices that are missing: all of them, or none.

        Raises:
            NotReady: one cannot be made; those that were made are removed again.
        """
        made: list[str] = []
        try:
            for device in devices:
                if self._path(device.key) is None:
                    made.append(device.key)
                    self._make(device)
                self._await_node(device.key)
        except NotReady:
            for one in made:
                with suppress(NotReady):  # the release removes it
                    self.remove(one)
            raise

    def remove(self, one: str) -> None:
        """Remove a device of ours; others' are left alone, and one that is gone is no error.

        Raises:
            NotReady: it is in use, or the kernel refuses.
        """
        path = self._path(one)
        kind = sysfs.linked_name(self._host, path / "mdev_type") if path is not None else None
        if path is None or kind is None or one not in uuids(path.parent.name, kind):
            return
        iommu.refuse_open(self._host, self._kernel, path, f"mediated device {one} is not removed")
        try:
            self._kernel.write(path / "remove", "1")
        except OSError as error:
            if error.errno not in GONE:
                raise NotReady(f"mediated device {one} cannot be removed: {reason_of(error)}") from error

    def _path(self, one: str) -> HostPath | None:
        return sysfs.device(self._host, parents.MADE / one)

    def _make(self, device: Device) -> None:
        (kind,) = device.attributes["type_id"]
        parent = parents.of(self._host, device.unit)
        if parent is None:
            raise NotReady(f"{device.unit} has no mediated devices any more")
        if not parents.available(self._host, parent, kind):  # it shrinks when another type is made of the same parent
            raise NotReady(f"{device.unit} has no room for one more {kind} (available_instances is 0)")
        with explained(f"the kernel makes no {kind} of {device.unit}"):
            self._kernel.write(parent / parents.TYPES / kind / "create", device.key)

    def _await_node(self, one: str) -> None:
        def is_there() -> bool:
            group = sysfs.linked_name(self._host, parents.MADE / one / "iommu_group")
            return group is not None and self._host.local(iommu.NODES / group).exists()

        if not self._kernel.wait(is_there, _NODE_APPEARS):
            raise NotReady(f"mediated device {one} was made and has no node in {iommu.NODES}: is vfio_mdev loaded?")
