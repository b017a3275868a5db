"""Which PCI functions are GPUs, and of which vendor; what the module of each vendor does (`Vendor`), and how a GPU and its parts become devices."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from msgspec.structs import replace

from backends.base import (
    NUMBER,
    TEXT,
    Attribute,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Host,
    HostPath,
    Mount,
    Signal,
    one_of,
)
from backends.gpu.nodes import Wanted, handed_out, numbers
from backends.gpu.options import GpuResource
from backends.linux import pci, sysfs
from backends.linux.pci import Function

Attributes: TypeAlias = Mapping[str, tuple[str, ...]]


class Vendor(ABC):
    """Finds the GPUs of one vendor and hands them out."""

    group: str | None = None
    """The unit for what all its GPUs have together (links between them, partitions); None: nothing."""
    roots: Sequence[HostPath] = ()
    """Where else nodes may lie: with /run/nvidia/driver, /run/nvidia/driver/dev/nvidia0 replaces /dev/nvidia0."""

    def __init__(self, host: Host, resources: Sequence[GpuResource]) -> None:  # noqa: ARG002  # some vendors need them
        self.host = host

    @abstractmethod
    def found(self, function: Function) -> Discovery:
        """The GPU that a PCI function is, and the parts it is divided into."""

    @abstractmethod
    def together(self) -> Discovery:
        """The devices and links of the unit `group`."""

    @abstractmethod
    def directories(self, addresses: Iterable[str]) -> Iterable[HostPath]:
        """Where entries come late, after the kernel's event; `addresses` are those of its GPUs."""

    @abstractmethod
    def concerned(self, path: HostPath, addresses: Sequence[str]) -> Iterable[str]:
        """Which of its GPUs have to be looked at after that entry came, went or changed."""

    def probe(self, device: Device) -> Iterable[Signal]:  # noqa: ARG002  # by default nothing
        """Signals about its health beside those of its nodes and of PCI."""
        return ()

    def ids(self, resource: GpuResource, device: Device) -> Sequence[str] | None:  # noqa: ARG002  # by default none
        """The IDs of a device where they are not the usual ones."""
        return None

    def edits(self, resource: GpuResource, grants: Sequence[Grant]) -> ContainerEdits:  # noqa: ARG002  # by default none
        """What a container gets with these, all of which are this vendor's."""
        return ContainerEdits.of(grants)


def driver_fault(function: Function, driver: str) -> str:
    """Why the GPU cannot be used as it is: it is bound to no driver, or to another; empty if it is bound to this one."""
    if function.driver is None:
        return f"it has no driver; {driver} is needed"
    return "" if function.driver == driver else f"it is bound to {function.driver}, not to {driver}"


def gpu(
    function: Function,
    wanted: Sequence[Wanted],
    attributes: Attributes,
    *,
    uuid: str | None = None,
    identity: str | None = None,
    mounts: tuple[Mount, ...] = (),
) -> Device:
    """The device that a PCI function is; its key is its UUID, or else its address."""
    return replace(
        function.as_device(),
        key=uuid or function.address,
        identity=identity or function.ids,
        nodes=handed_out(wanted),
        mounts=mounts,
        attributes={**attributes, **numbers(wanted)},
    )


def part(whole: Device, key: str, wanted: Sequence[Wanted], attributes: Attributes) -> Device:
    """A part of a GPU: what concerns the GPU concerns it too, but it owns nothing of it."""
    own = f"part:{key}"
    return replace(
        whole,
        key=key,
        hardware=frozenset({own}),
        bindings=driven_as(whole, own),
        depends=whole.hardware | whole.depends,
        nodes=handed_out(wanted),
        ancestry=(*whole.ancestry, *whole.attributes["address"]),
        attributes={**attributes, **numbers(wanted)},
    )


def driven_as(whole: Device, *parts: str) -> Mapping[str, str]:
    """The bindings of parts of a GPU: its driver is theirs."""
    return {part: binding for binding in whole.bindings.values() for part in parts}


def stripped(device: Device, why: str) -> Device:
    """A device that cannot be had as it is: without what would be handed out. Without a reason it is as it was."""
    if not why:
        return device
    attributes = {name: values for name, values in device.attributes.items() if name != "node_numbers"}
    return replace(device, unusable=why, nodes=(), mounts=(), attributes=attributes)


LIBRARY_ATTRIBUTES: Final = (
    "addressing_mode", "architecture", "brand", "compute_capability", "cuda_version", "driver_version"
)  # fmt: skip
"""Of NVIDIA's GPUs, mostly known by its library, which is asked for them only where a resource needs them."""

ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    **pci.ATTRIBUTES,
    "boot_display": one_of("yes", "no"),
    "platform": one_of("tegra", "wsl"),
    **dict.fromkeys(("uuid", "serial", "model", "parent", "profile", "monitoring", "node_numbers"), TEXT),
    **dict.fromkeys(LIBRARY_ATTRIBUTES, TEXT),
    **dict.fromkeys(("partition", "compute_partition", "memory_partition"), TEXT),
    **dict.fromkeys(("minor", "gi", "ci", "memory"), NUMBER),
    "index": Attribute("a number, of a MIG device two, as in '0:1'", "[0-9]+(:[0-9]+)?"),
}
"""The attributes of `described`, of MIG devices, and of GPUs that are not on PCI, of all vendors."""


def described(function: Function, **more: str | None) -> Attributes:
    """The attributes of a GPU: those of its PCI function, and what else is known."""
    known = {name: (value,) for name, value in more.items() if value}
    return {**function.attributes(), "boot_display": ("yes" if function.boot_display else "no",), **known}


# --- which functions are GPUs: by class and vendor alone, which is cheap ---


NVIDIA: Final = "10de"
AMD: Final = "1002"
INTEL: Final = "8086"

_DISPLAY: Final = "03"  # the base classes of PCI Code and ID Assignment: display controller
_ACCELERATOR: Final = "12"  # processing accelerator, as AMD's Instinct cards since MI300 say; Intel's are NPUs

_HEXADECIMAL: Final = re.compile("0x(?:[0-9a-f]{4}|[0-9a-f]{6})")  # a vendor, a class


def is_gpu(vendor: str, kind: str) -> bool:
    """Whether a function of this vendor and class is one that this backend can hand out."""
    if kind.startswith(_ACCELERATOR):
        return vendor == AMD
    return vendor in (NVIDIA, AMD, INTEL) and kind.startswith(_DISPLAY)


def gpu_addresses(host: Host) -> Iterator[tuple[str, str]]:
    """The address and the vendor of every GPU.

    Raises:
        OSError: the list of functions cannot be read.
    """
    for address in pci.addresses(host):
        path = pci.FUNCTIONS / address
        kind = _number(host, path / "class")
        if kind and not kind.startswith((_DISPLAY, _ACCELERATOR)):
            continue
        vendor: str | None = _number(host, path / "vendor")
        if not kind or not vendor:
            vendor = vendor_of(sysfs.properties(host, path))
        elif not is_gpu(vendor, kind):
            vendor = None
        if vendor is not None:
            yield address, vendor


def vendor_of(properties: Mapping[str, str]) -> str | None:
    """The vendor of a GPU by the properties of an event about it, or of its `uevent` (PCI_CLASS and PCI_ID)."""
    kind, vendor = pci.kind_and_vendor(properties)
    return vendor if is_gpu(vendor, kind) else None


def _number(host: Host, path: HostPath) -> str:
    """The digits of an attribute such as `0x030200`; "" if they cannot be read, or are none."""
    text = (sysfs.attribute(host, path) or "").lower()
    return text.removeprefix("0x") if _HEXADECIMAL.fullmatch(text) else ""
