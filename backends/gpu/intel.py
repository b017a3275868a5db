"""Intel's GPUs, as its device plugin hands them out; their driver, i915 or xe, is an attribute to select by.

IDs are PCI addresses: those of Intel's plugin (`card0-0`) follow the order in which drivers were bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from backends.base import ContainerEdits, Device, Discovery, Grant, Host, HostPath, Mount, Signal
from backends.gpu import nodes
from backends.gpu.options import GpuResource
from backends.gpu.vendor import described, gpu, withheld
from backends.linux import pci, sysfs

DRIVERS: Final = ("i915", "xe")
BY_PATH: Final = nodes.DRI / "by-path"


class Intel:
    """Finds Intel's GPUs and hands them out."""

    group: ClassVar[str | None] = None
    roots: Sequence[HostPath] = ()

    def __init__(self, host: Host, resources: Sequence[GpuResource]) -> None:  # noqa: ARG002  # as other vendors'
        self.host = host

    def found(self, function: pci.Function) -> Discovery:
        """The GPU."""
        wanted = nodes.drm(self.host, function.path, function.drm)
        unusable = _obstacle(function) or nodes.fault(self.host, wanted) or ""
        device = gpu(function, wanted, described(function), mounts=self._by_path(function.address))
        return Discovery((withheld(device, unusable),))

    def _by_path(self, address: str) -> tuple[Mount, ...]:
        """Links that udev makes to the nodes, by which Intel's libraries tell several GPUs apart."""
        try:
            names = sysfs.entries(self.host, BY_PATH)
        except OSError:
            return ()
        mine = [BY_PATH / name for name in names if name.startswith(f"pci-{address}-")]
        return tuple(Mount(path, path.text, read_only=True) for path in mine)

    def together(self) -> Discovery:
        """Nothing."""
        return Discovery()

    def probe(self, device: Device) -> Iterable[Signal]:  # noqa: ARG002  # an interface's
        """Nothing."""
        return ()

    def directories(self, addresses: Iterable[str]) -> Iterable[HostPath]:  # noqa: ARG002  # an interface's
        """Where the nodes are, and the links that udev makes later."""
        return [nodes.DRI, BY_PATH]

    def concerned(self, path: HostPath, addresses: Sequence[str]) -> Iterable[str]:
        """The GPU that a link names; all of them, if it is a node."""
        if path.parent == BY_PATH:
            return [address for address in addresses if path.name.startswith(f"pci-{address}-")]
        return addresses if path in (nodes.DRI, BY_PATH) or path.parent == nodes.DRI else ()

    def ids(self, resource: GpuResource, device: Device) -> Sequence[str] | None:  # noqa: ARG002  # an interface's
        """The usual ones."""
        return None

    def edits(self, resource: GpuResource, grants: Sequence[Grant]) -> ContainerEdits:  # noqa: ARG002
        """The nodes and the links."""
        return ContainerEdits.of(grants)


def _obstacle(function: pci.Function) -> str:
    if function.virtual:
        return f"it is divided into {len(function.virtual)} virtual functions, which are offered instead"
    if function.driver is None:
        return f"it has no driver; {' or '.join(DRIVERS)} is needed"
    if function.driver not in DRIVERS:
        return f"it is bound to {function.driver}, not to {' or '.join(DRIVERS)}"
    return "" if function.drm else "its driver has not made its DRM devices"
