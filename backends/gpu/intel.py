"""Hands out Intel's GPUs as Intel's device plugin does; the driver, i915 or xe, is an attribute to select by.

IDs are PCI addresses unless `card_ids` is set: those of Intel's plugin (`card0-0`) depend on the order in which drivers were
bound. A resource that selects by `monitoring` gets one device with all GPUs of some drivers, for programs that watch them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from backends.base import ContainerEdits, Device, Discovery, Grant, Host, HostPath, Mount
from backends.errors import several
from backends.gpu import nodes
from backends.gpu.nodes import Wanted
from backends.gpu.options import GpuResource
from backends.gpu.vendor import INTEL, Vendor, described, gpu, gpu_addresses, stripped
from backends.linux import pci, sysfs

DRIVERS: Final = ("i915", "xe")
MONITORING: Final = "monitoring"
TOGETHER: Final = "intel-monitoring"
"""The unit for what all GPUs are together."""
BY_PATH: Final = nodes.DRI / "by-path"


class Intel(Vendor):
    """Finds Intel's GPUs and hands them out."""

    def __init__(self, host: Host, resources: Sequence[GpuResource]) -> None:
        super().__init__(host, resources)
        self._monitors = [
            (resource, drivers)
            for resource in resources
            for it in resource.spec.select
            if (drivers := it.get(MONITORING))
        ]
        self.group = TOGETHER if self._monitors else None

    def found(self, function: pci.Function) -> Discovery:
        """The GPU."""
        wanted = nodes.drm(self.host, function.path, function.drm)
        unusable = _obstacle(function) or nodes.fault(self.host, wanted) or ""
        device = gpu(function, wanted, described(function), mounts=self._by_path(function.address))
        return Discovery((stripped(device, unusable),))

    def _by_path(self, address: str) -> tuple[Mount, ...]:
        """The links that udev makes to the nodes; Intel's libraries tell several GPUs apart by them."""
        mine = [BY_PATH / name for name in sysfs.names(self.host, BY_PATH) if name.startswith(f"pci-{address}-")]
        return tuple(Mount(path, path.text, read_only=True) for path in mine)

    def together(self) -> Discovery:
        """A device for each resource that selects by `monitoring`: all nodes of the GPUs with the drivers it names."""
        return Discovery(tuple(device for one in self._monitors for device in self._monitoring(*one)))

    def _monitoring(self, resource: GpuResource, drivers: tuple[str, ...]) -> Iterator[Device]:
        found = [
            wanted
            for address, vendor in gpu_addresses(self.host)
            if vendor == INTEL and (function := pci.read(self.host, address)) and function.driver in drivers
            if not _obstacle(function)
            for wanted in (*nodes.drm(self.host, function.path, function.drm), *self._mei(function.path))
            if nodes.fault(self.host, [wanted]) is None
        ]
        if found:
            yield Device(
                key="all",
                unit=TOGETHER,
                hardware=frozenset({f"{MONITORING}:{resource.configured}"}),
                resource=resource.configured,
                identity="all",
                nodes=tuple(replace(node, shared=True) for node in nodes.handed_out(found)),
                attributes={"vendor": (INTEL,), MONITORING: drivers, **nodes.numbers(found)},
            )

    def _mei(self, path: HostPath) -> Iterator[Wanted]:
        """The nodes of the management engines that a GPU has (`<name>.mei-gsc.<number>/mei/mei0` below its function)."""
        for name in sysfs.entries(self.host, path):
            if ".mei-" in name:
                for engine in sysfs.entries(self.host, path / name / "mei"):
                    node = sysfs.node(self.host, path / name / "mei" / engine)
                    yield Wanted(node.path, node.number) if node else Wanted(HostPath("/dev") / engine)

    def directories(self, addresses: Iterable[str]) -> Iterable[HostPath]:  # noqa: ARG002  # an interface's
        """Where the nodes are, and the links that udev makes later."""
        return [nodes.DRI, BY_PATH]

    def concerned(self, path: HostPath, addresses: Sequence[str]) -> Iterable[str]:
        """The GPU that a link names; all GPUs, if the path is a node."""
        if path.parent == BY_PATH:
            return [address for address in addresses if path.name.startswith(f"pci-{address}-")]
        units = [*addresses, *([self.group] if self.group else [])]
        return units if path in (nodes.DRI, BY_PATH) or path.parent == nodes.DRI else ()

    def ids(self, resource: GpuResource, device: Device) -> Sequence[str] | None:
        """The usual ones, or `card0-0`, `card0-1`, one for each pod that may have the GPU."""
        cards = [node.path.name for node in device.nodes if node.path.name.startswith("card")]
        if not resource.spec.options.card_ids or device.unit == self.group:
            return None
        return [f"{card}-{n}" for card in cards[:1] for n in range(resource.spec.replicas)]

    def edits(self, resource: GpuResource, grants: Sequence[Grant]) -> ContainerEdits:
        """The nodes, and the links as `by_path` says."""
        edits = ContainerEdits.of(grants)
        if resource.spec.options.by_path == "none":
            return replace(edits, mounts=())
        if resource.spec.options.by_path == "all" and edits.mounts:
            return replace(edits, mounts=(Mount(BY_PATH, BY_PATH.text, read_only=True),))
        return edits


def _obstacle(function: pci.Function) -> str:
    if function.virtual:
        return f"it is divided into {several(len(function.virtual), 'virtual function')}, which are offered instead"
    if function.driver is None:
        return f"it has no driver; {' or '.join(DRIVERS)} is needed"
    if function.driver not in DRIVERS:
        return f"it is bound to {function.driver}, not to {' or '.join(DRIVERS)}"
    return "" if function.drm else "its driver has not made its DRM devices"
