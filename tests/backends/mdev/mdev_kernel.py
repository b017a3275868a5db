"""A kernel with one driver of mediated devices: it acts on what is written to it, in a tree that it changes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable

from backends.base import Host, HostPath
from backends.linux.kernel import Kernel
from tests.backends.crashes import Fuse
from tests.backends.mdev.mdev_trees import T4_PATH, T4_TYPES, made
from tests.backends.trees import plant


class MdevKernel(Kernel):
    """All devices of a T4 have one type: while there is one, no other can be made."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.host = host
        self.fuse = Fuse()
        self.open: set[str] = set()
        """Paths of nodes that a virtual machine has open."""
        self.written: list[tuple[str, str]] = []
        self.grouped = True
        """Whether a vfio driver takes what is made."""
        self._groups = 70

    @property
    def made(self) -> dict[str, str]:
        """UUID → type."""
        links = (self.host.sys / "bus/mdev/devices").glob("*")
        return {link.name: (link / "mdev_type").readlink().name for link in links}

    def write(self, path: HostPath, text: str) -> None:
        self.fuse.step()
        self.written.append((path.text, text))
        super().write(path, text)
        self.create(path.parent.name, text) if path.name == "create" else self.remove(path.parent.name)
        self.fuse.step()

    def create(self, kind: str, uuid: str) -> None:
        if uuid in self.made:
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        if not self._room(kind):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._groups += 1
        plant(self.host.root, made(T4_PATH, uuid, kind, self._groups if self.grouped else None))
        self._count()

    def remove(self, uuid: str) -> None:
        path = self.host.sys / "devices" / T4_PATH
        kind = self.made[uuid]
        if (path / uuid / "iommu_group").is_symlink():
            group = (path / uuid / "iommu_group").readlink().name
            assert f"/dev/vfio/{group}" not in self.open, "the kernel would wait for ever"
            (self.host.dev / "vfio" / group).unlink()
        (path / "mdev_supported_types" / kind / "devices" / uuid).unlink()
        (self.host.sys / "bus/mdev/devices" / uuid).unlink()
        shutil.rmtree(path / uuid)
        self._count()

    def try_open(self, path: HostPath) -> None:
        if path.text in self.open:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        return is_so()

    def node(self, uuid: str) -> str:
        """The node of the group that a device has."""
        group = (self.host.sys / "bus/mdev/devices" / uuid / "iommu_group").readlink().name
        return f"/dev/vfio/{group}"

    def _room(self, kind: str) -> int:
        there = list(self.made.values())
        return T4_TYPES[kind][1] - len(there) if set(there) <= {kind} else 0

    def _count(self) -> None:
        for kind in T4_TYPES:
            file = self.host.sys / "devices" / T4_PATH / "mdev_supported_types" / kind / "available_instances"
            file.write_text(f"{self._room(kind)}\n")
