"""Reads IOMMU groups: functions that the IOMMU cannot isolate from each other, and what keeps a group from use.

A group is handed out whole or not at all. It is viable if every member is unbound, on a vfio driver, or on one that does no
DMA by itself (Documentation/driver-api/vfio.rst).
Files: Documentation/ABI/testing/sysfs-kernel-iommu_groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath, NotReady
from backends.errors import reason_of
from backends.linux import pci, sysfs
from backends.linux.kernel import GONE, Kernel

GROUPS: Final = HostPath("/sys/kernel/iommu_groups")
NODES: Final = HostPath("/dev/vfio")

_VFIO_DRIVER: Final = re.compile(r"(?:.*[-_])?vfio[-_]pci")  # vfio-pci, mlx5_vfio_pci, nvgrace-gpu-vfio-pci
_HARMLESS: Final = frozenset({"pci-stub", "pcieport"})  # both have `driver_managed_dma`
_PCI_BRIDGES: Final = ("0604", "0609")  # to another PCI bus (pci_ids.h); vfio has always left these alone


_CPUS: Final[Mapping[str, str]] = {
    "vendor_id: GenuineIntel": "turn VT-d on in the firmware, and write intel_iommu=on on the kernel's command line",
    "vendor_id: (AuthenticAMD|HygonGenuine)": "turn AMD-Vi (IOMMU) on in the firmware; the kernel uses it by itself",
    "vendor_id: IBM/S390": "s390x has one for each PCI function; the kernel needs CONFIG_S390_IOMMU",
    "cpu: POWER": "POWER's is always on and has a group for each PE; the kernel's log says why this function is in none (IODA)",
    "CPU implementer: .*": "the firmware must tell the kernel of an SMMU, in ACPI's table IORT or in the device tree; "
    "the kernel's log has a line of arm-smmu for each",
    "isa: rv.*": "the firmware must tell the kernel of an IOMMU, in ACPI's table RIMT or in the device tree",
}
"""A line of /proc/cpuinfo (arch/*/kernel/cpu/proc.c, setup-common.c, cpuinfo.c) → how its machines turn the IOMMU on."""
_OFF: Final = frozenset({"intel_iommu=off", "amd_iommu=off", "iommu=off", "pci=nommu"})
"""What turns it off on the kernel's command line (Documentation/admin-guide/kernel-parameters.txt)."""


class Member(Struct, frozen=True):
    """A device of a group."""

    name: str
    """A PCI address, or what another bus calls it."""
    driver: str | None
    function: pci.Function | None
    """None if it is on no PCI bus."""

    @property
    def is_bridge(self) -> bool:
        """Whether it is a bridge to another PCI bus, which cannot be handed out."""
        return self.function is not None and self.function.kind.startswith(_PCI_BRIDGES)

    @property
    def is_viable(self) -> bool:
        """Whether its driver lets the group be handed out."""
        if self.driver is None or self.driver in _HARMLESS or self.is_bridge:
            return True
        return self.function is not None and is_vfio(self.function)


class Group(Struct, frozen=True):
    """An IOMMU group, as one look found it; it is handed out whole."""

    number: str
    """Empty where a function is in no group at all."""
    members: tuple[Member, ...]
    is_noiommu: bool = False
    """No IOMMU protects the rest of the memory from its function."""

    @property
    def functions(self) -> tuple[pci.Function, ...]:
        """The functions that can be handed out: no bridges."""
        return tuple(m.function for m in self.members if m.function is not None and not m.is_bridge)

    @property
    def bindings(self) -> dict[str, str]:
        """The bindings of all functions, for `Device.bindings`."""
        return {name: binding for function in self.functions for name, binding in function.bindings().items()}

    @property
    def name(self) -> str:
        """Its name in a sentence."""
        return f"IOMMU group {self.number}" if self.number else "no IOMMU group"


def is_vfio(function: pci.Function) -> bool:
    """Whether a function is on vfio-pci or a variant of it, or is a vGPU. From kernel 6.1 on, `vfio-dev` says so."""
    return bool(function.vfio or function.vgpu_type) or (
        function.driver is not None and _VFIO_DRIVER.fullmatch(function.driver) is not None
    )


def units(host: Host) -> Iterator[str]:
    """The number of each group, and the address of each function that has no group of its own.

    Raises:
        OSError: the functions cannot be listed.
    """
    seen: set[str] = set()
    for address in pci.addresses(host):
        number = sysfs.linked_name(host, pci.FUNCTIONS / address / "iommu_group")
        unit = address if number is None or is_noiommu_group(host, number) else number
        if unit not in seen:
            seen.add(unit)
            yield unit


def refuse_open(host: Host, kernel: Kernel, device: HostPath, refused: str) -> None:
    """Refuse to change a device whose group is in use: the change would wait for that use to end, or break it.

    A group's node can be open once at a time, and not beside its function's own (vfio_group_fops_open).

    Raises:
        NotReady: it begins with `refused`.
    """
    if (group := sysfs.linked_name(host, device / "iommu_group")) is None:
        return
    try:
        kernel.try_open(NODES / group)
    except OSError as error:
        if error.errno not in GONE:
            raise NotReady(f"{refused} while {NODES / group} is in use: {reason_of(error)}") from error


def read(host: Host, unit: str) -> Group | None:
    """The group behind a unit; None if it is gone."""
    return _around(host, unit) if pci.ADDRESS.fullmatch(unit) else _numbered(host, unit)


def _around(host: Host, address: str) -> Group | None:
    """The group of a function without an IOMMU, whether or not vfio has made one for it."""
    function = pci.read(host, address)
    if function is None:
        return None
    members = (Member(address, function.driver, function),)
    if function.iommu_group is None:
        return Group("", members)
    return (
        Group(function.iommu_group, members, is_noiommu=True) if is_noiommu_group(host, function.iommu_group) else None
    )


def _numbered(host: Host, number: str) -> Group | None:
    if not number.isdecimal() or is_noiommu_group(host, number):
        return None
    names = sysfs.names(host, GROUPS / number / "devices")
    members = tuple(member for name in names if (member := _member(host, number, name)) is not None)
    return Group(number, members) if members else None


def _member(host: Host, number: str, name: str) -> Member | None:
    if pci.ADDRESS.fullmatch(name):
        function = pci.read(host, name)
        return None if function is None else Member(name, function.driver, function)
    path = sysfs.device(host, GROUPS / number / "devices" / name)
    return None if path is None else Member(name, sysfs.linked_name(host, path / "driver"), None)


@lru_cache(maxsize=4)
def how_to_turn_on(host: Host) -> str:
    """What to do where PCI functions are in no group, by the host's processor; it stays the same until a reboot."""
    said = sysfs.attribute(host, HostPath("/proc/cpuinfo")) or ""
    lines = {re.sub(r"\s*:\s*", ": ", line) for line in said.splitlines()}
    advice = next((advice for line, advice in _CPUS.items() if any(re.match(line, it) for it in lines)), None)
    if off := sorted(_OFF.intersection((sysfs.attribute(host, HostPath("/proc/cmdline")) or "").split())):
        return f"take {' and '.join(off)} off the kernel's command line" + (f"; {advice}" if advice else "")
    if any(line.startswith("flags: ") and " hypervisor" in line for line in lines):
        return "this is a virtual machine, which must be given an IOMMU by its hypervisor"
    return advice or "turn the IOMMU on, in the firmware and, where it needs that, on the kernel's command line"


def is_noiommu_group(host: Host, number: str) -> bool:
    """Whether vfio has made up the group for a function without an IOMMU (drivers/vfio/group.c)."""
    return sysfs.attribute(host, GROUPS / number / "name") == "vfio-noiommu"
