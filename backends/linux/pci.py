"""Reads a PCI function from sysfs into one frozen value, tells which functions an event is about, and resets one alone.

What is missing is unknown, and None or empty here; what is garbage is reported in `problems`. Files are left out for which
the kernel waits while a driver is being bound or makes virtual functions, which can take half a minute (`driver_override`,
`sriov_numvfs`: device_lock in drivers/pci/pci-sysfs.c and iov.c).
Files: Documentation/ABI/testing/sysfs-bus-pci, Documentation/PCI/sysfs-pci.rst.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from msgspec import Struct

from backends.base import (
    HEX4,
    NUMBER,
    TEXT,
    AllocationRefused,
    Attribute,
    Device,
    Hint,
    Host,
    HostPath,
    Known,
    Problem,
    Uevent,
    one_of,
)
from backends.errors import not_short, reason_of, several
from backends.linux import sysfs

FUNCTIONS: Final = HostPath("/sys/bus/pci/devices")

ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
"""`domain:bus:device.function`; a domain made by VMD or Hyper-V has more than four digits."""

_DOMAIN: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_IDS: Final = re.compile(r"([0-9A-F]{1,4}):([0-9A-F]{1,4})", re.IGNORECASE)
_CLASS: Final = re.compile(r"[0-9A-F]{1,6}", re.IGNORECASE)
_FORMATS: Final = (
    ("PCI_ID", _IDS, "are no IDs"),
    ("PCI_SUBSYS_ID", _IDS, "are no IDs"),
    ("PCI_CLASS", _CLASS, "is no class"),
)
"""The formats of properties in a function's `uevent`."""


_ADDRESS: Final = Attribute("a PCI address with its domain, as in '0000:3b:00.0'", ADDRESS.pattern)
ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    "address": _ADDRESS,
    "vendor": HEX4,
    "device": HEX4,
    "id": Attribute("vendor and device, as in '10de:2330'", "[0-9a-f]{4}:[0-9a-f]{4}"),
    "subsystem_vendor": HEX4,
    "subsystem_device": HEX4,
    "class": Attribute("six hexadecimal digits in quotes, as in '030200'", "[0-9a-f]{6}", quoted=True),
    "driver": TEXT,
    "numa_node": NUMBER,
    "iommu_group": NUMBER,
    "function": one_of("physical", "virtual"),
    "physical": _ADDRESS,
    "vgpu_type": NUMBER,
}
"""The attributes of `Function.attributes`."""

_OF_SUBFUNCTIONS: Final = ("vendor", "device", "id", "subsystem_vendor", "subsystem_device", "driver", "numa_node")


class Function(Struct, frozen=True):
    """A PCI function, as one look at its directory found it."""

    address: str
    """`0000:3b:00.0`"""
    path: HostPath
    """Its directory below /sys/devices."""
    vendor: str = ""
    """Four hexadecimal digits, lower case, as `device` and the subsystem's; empty if unknown."""
    device: str = ""
    subsystem_vendor: str = ""
    subsystem_device: str = ""
    kind: str = ""
    """The class: six hexadecimal digits, `030200` a 3D controller."""
    driver: str | None = None
    binding: str = ""
    """See `Device.bindings`: the driver, and the inode numbers of its link and of the directory; empty without a driver.
    kernfs uses no number twice within a boot, so that a driver that left and came back is noticed without an event."""
    numa_node: int | None = None
    ancestry: tuple[str, ...] = ()
    """The host bridge (`pci0000:3a`) and the bridges below it, from the root."""
    iommu_group: str | None = None
    """The group's number."""
    physical: str | None = None
    """The physical function of a virtual one."""
    virtual: tuple[str, ...] = ()
    """The virtual functions of a physical one, in the order of their numbers."""
    drm: tuple[str, ...] = ()
    """The names in the directory `drm`: `card0`, `renderD128`; the other kinds of children likewise."""
    infiniband: tuple[str, ...] = ()
    net: tuple[str, ...] = ()
    vfio: tuple[str, ...] = ()
    """`vfio-dev`'s: `vfio3` is the node /dev/vfio/devices/vfio3 (kernel 6.6 and newer)."""
    vgpu_type: str = ""
    """The number of the vGPU type that NVIDIA's driver has given this virtual function, as `558`; empty: none. It is a vfio
    device then, on its own driver (NVIDIA's vGPU user guide: vendor-specific VFIO framework)."""
    boot_display: bool = False
    """Whether it is the screen of the firmware (`boot_vga`)."""
    entries: frozenset[str] = frozenset()
    """The names in its directory, so that missing files need not be looked for."""
    problems: tuple[Problem, ...] = ()

    @property
    def hardware(self) -> str:
        """The name of the function as hardware."""
        return f"pci:{self.address}"

    @property
    def ids(self) -> str:
        """All its IDs, which tell one model from another: `10de:2330 10de:16c1`."""
        return f"{self.vendor}:{self.device} {self.subsystem_vendor}:{self.subsystem_device}"

    def bindings(self, *more: str) -> dict[str, str]:
        """For `Device.bindings`: of the function, and of what else its driver drives; empty without a driver."""
        return dict.fromkeys((self.hardware, *more), self.binding) if self.binding else {}

    def as_device(self) -> Device:
        """The function as a device, which each PCI backend adds to."""
        return Device(
            key=self.address,
            unit=self.address,
            hardware=frozenset((self.hardware,)),
            depends=frozenset((f"pci:{self.physical}",)) if self.physical else frozenset(),
            identity=self.ids,
            bindings=self.bindings(),
            numa_node=self.numa_node,
            ancestry=self.ancestry,
            attributes=self.attributes(),
        )

    def subfunction_attributes(self) -> dict[str, tuple[str, ...]]:
        """The attributes that hold for its subfunctions, too."""
        return {name: values for name, values in self.attributes().items() if name in _OF_SUBFUNCTIONS}

    def attributes(self) -> dict[str, tuple[str, ...]]:
        """The attributes of every PCI backend; those unknown are left out."""
        found = {
            "address": self.address,
            "vendor": self.vendor,
            "device": self.device,
            "id": f"{self.vendor}:{self.device}" if self.vendor and self.device else None,
            "subsystem_vendor": self.subsystem_vendor,
            "subsystem_device": self.subsystem_device,
            "class": self.kind,
            "driver": self.driver,
            "numa_node": None if self.numa_node is None else str(self.numa_node),
            "iommu_group": self.iommu_group,
            "function": "physical" if self.physical is None else "virtual",
            "physical": self.physical,
            "vgpu_type": self.vgpu_type,
        }
        # hundreds of virtual functions have most values in common: each is kept once
        return {name: (sys.intern(value),) for name, value in found.items() if value}


def addresses(host: Host) -> list[str]:
    """The addresses of all functions, in order.

    Raises:
        OSError: the list cannot be read.
    """
    return [name for name in sysfs.entries(host, FUNCTIONS) if ADDRESS.fullmatch(name)]


def announced(host: Host) -> Iterator[tuple[str, str, str]]:
    """Address, class and vendor of every function, by its `uevent` alone: `read` takes many more files.

    Raises:
        OSError: as `addresses`.
    """
    for address in addresses(host):
        yield address, *kind_and_vendor(sysfs.properties(host, FUNCTIONS / address))


def kind_and_vendor(properties: Mapping[str, str]) -> tuple[str, str]:
    """Class and vendor, as `Function` has them, by the properties of an event or of a function's `uevent`."""
    kind, vendor = properties.get("PCI_CLASS", ""), properties.get("PCI_ID", "").partition(":")[0]
    return kind.rjust(6, "0").lower(), vendor.rjust(4, "0").lower()


def read(host: Host, address: str) -> Function | None:
    """The function of that address; None if it is gone."""
    path = sysfs.target(host, FUNCTIONS / address)
    if path is None:
        return None
    try:
        inode = os.stat(host.spell(path)).st_ino  # noqa: PTH116  # as `Host.spell`
        entries = frozenset(os.listdir(host.spell(path)))  # noqa: PTH208  # iterdir makes a Path of each of its 60 names
    except OSError as error:
        not_short(error)
        return None
    said = sysfs.properties(host, path)
    problems = tuple(_problems(said, address))
    vendor, device = _ids(said, "PCI_ID")
    subsystem_vendor, subsystem_device = _ids(said, "PCI_SUBSYS_ID")
    kind = said.get("PCI_CLASS", "")
    driver = sysfs.linked_name(host, path / "driver") if "driver" in entries else None
    return Function(
        address=address,
        path=path,
        vendor=vendor,
        device=device,
        subsystem_vendor=subsystem_vendor,
        subsystem_device=subsystem_device,
        kind=kind.lower().rjust(6, "0") if _CLASS.fullmatch(kind) else "",
        driver=driver,
        binding=f"{driver}:{_inode(host, path / 'driver')}:{inode}" if driver else "",
        numa_node=sysfs.numa_node(host, path),
        ancestry=ancestry(path),
        iommu_group=sysfs.linked_name(host, path / "iommu_group") if "iommu_group" in entries else None,
        physical=_linked_address(host, path / "physfn") if "physfn" in entries else None,
        virtual=tuple(_virtual(host, path, entries)),
        drm=_children(host, path, "drm", entries),
        infiniband=_children(host, path, "infiniband", entries),
        net=_children(host, path, "net", entries),
        vfio=_children(host, path, "vfio-dev", entries),
        vgpu_type=_vgpu_type(host, path, entries) if driver == "nvidia" else "",
        entries=entries,
        boot_display="boot_vga" in entries and sysfs.number(host, path / "boot_vga") == 1,
        problems=problems,
    )


def routing_id(address: str) -> int:
    """Bus, device and function of an address as one number; virtual functions are placed by it."""
    _, bus, place = address.split(":")
    device, function = place.split(".")
    return int(bus, 16) << 8 | int(device, 16) << 3 | int(function)


def ancestry(path: HostPath) -> tuple[str, ...]:
    """The host bridge and the bridges above a device, from the root."""
    *above, _ = path.text.split("/")
    return tuple(part for part in above if ADDRESS.fullmatch(part) or _DOMAIN.fullmatch(part))


def address_in(devpath: str) -> str | None:
    """The function that a kernel object is or belongs to: the last one in its path; None if there is none."""
    return next((part for part in reversed(devpath.split("/")) if ADDRESS.fullmatch(part)), None)


def affected(hint: Hint, known: Known) -> frozenset[str]:
    """The functions to look at again after an event: the one it is about, and those known to depend on it.

    An event of a bridge is about the functions below it. The backend adds the units of devices that own or depend on
    the function (`Known.minding`).
    """
    if not isinstance(hint, Uevent) or (address := address_in(hint.devpath)) is None:
        return frozenset()
    if known.minding(f"pci:{address}") or hint.subsystem != "pci":
        return frozenset((address,))
    below = (device for devices in known.values() for device in devices if address in device.ancestry)
    return frozenset(
        (
            address,
            *(name.removeprefix("pci:") for device in below for name in device.hardware if name.startswith("pci:")),
        )
    )


def driver_override(host: Host, address: str) -> str | None:
    """The only driver that may take the function; None if any may. Waits while a driver is being bound to it."""
    override = sysfs.attribute(host, FUNCTIONS / address / "driver_override")
    return None if override in ("", "(null)") else override


def undivided(hint: Hint, known: Known) -> frozenset[str]:
    """The physical functions that lost a virtual one with an event; the kernel sends none for them.

    By then sysfs does not list the virtual one any more (pci_iov_remove_virtfn in drivers/pci/iov.c).
    """
    if not isinstance(hint, Uevent) or (hint.subsystem, hint.action) != ("pci", "remove"):
        return frozenset()
    hardware = f"pci:{address_in(hint.devpath)}"
    devices = (device for unit in known.minding(hardware) for device in known[unit] if hardware in device.hardware)
    return frozenset(address for device in devices for address in device.attributes.get("physical", ()))


# --- reading ---


def _problems(said: Mapping[str, str], address: str) -> Iterator[Problem]:
    for key, pattern, fault in _FORMATS:
        if key in said and not pattern.fullmatch(said[key]):
            yield Problem(address, f"{address}: its uevent file says {key}={said[key]!r}, which {fault}")


def identity(host: Host, path: HostPath) -> str:
    """`Function.ids` of the function in this directory, by its `uevent` alone."""
    said = sysfs.properties(host, path)
    return " ".join(":".join(_ids(said, name)) for name in ("PCI_ID", "PCI_SUBSYS_ID"))


def _ids(said: Mapping[str, str], key: str) -> tuple[str, str]:
    """Vendor and device from the kernel's `VVVV:DDDD`."""
    found = _IDS.fullmatch(said.get(key, ""))
    return (found[1].lower().rjust(4, "0"), found[2].lower().rjust(4, "0")) if found else ("", "")


def _inode(host: Host, path: HostPath) -> int:
    try:
        return os.lstat(host.spell(path)).st_ino
    except OSError:
        return 0


def _linked_address(host: Host, link: HostPath) -> str | None:
    name = sysfs.linked_name(host, link)
    return name if name is not None and ADDRESS.fullmatch(name) else None


def _virtual(host: Host, path: HostPath, entries: Iterable[str]) -> Iterator[str]:
    numbers = sorted(int(name[6:]) for name in entries if name.startswith("virtfn") and name[6:].isdecimal())
    for number in numbers:
        if (address := _linked_address(host, path / f"virtfn{number}")) is not None:
            yield address


def _vgpu_type(host: Host, path: HostPath, entries: Iterable[str]) -> str:
    """The type of a virtual function. Physical ones, which have `sriov_totalvfs`, have none."""
    if "nvidia" not in entries or "sriov_totalvfs" in entries:
        return ""
    number = sysfs.number(host, path / "nvidia" / "current_vgpu_type")
    return str(number) if number is not None and number > 0 else ""


def _children(host: Host, path: HostPath, kind: str, entries: Iterable[str]) -> tuple[str, ...]:
    """The names of one kind of children, which the driver made."""
    return tuple(sysfs.names(host, path / kind)) if kind in entries else ()


# --- resetting one alone (Function Level Reset) ---


def reset_refusal(host: Host, function: Function) -> str:
    """Why a function cannot be reset alone (Function Level Reset), one sentence; empty if it can.

    From 5.15 on the kernel lists the methods in a file. If there is no method, that file and `reset` are missing.
    """
    if function.virtual:  # they would vanish (PCI Express Base Specification, 9.2.2.3)
        return (
            f"{function.address} has {several(len(function.virtual), 'virtual function')}, which would go with a reset"
        )
    if function.vgpu_type:
        return f"{function.address} has the vGPU type {function.vgpu_type}, and its driver resets it"
    methods = sysfs.attribute(host, function.path / "reset_method")
    if methods is None and not host.local(function.path / "reset").exists():
        methods = ""
    if methods is None or "flr" in methods.split():
        return ""
    other = f"only by {methods}" if methods else "at all"
    return f"{function.address} cannot be reset by itself (FLR), {other}"


def reset(host: Host, address: str) -> None:
    """Reset one function alone (Function Level Reset); may block for seconds.

    Raises:
        AllocationRefused: it cannot be reset so, or the reset failed.
    """
    path = FUNCTIONS / address
    function = read(host, address)
    if function is not None and (why := reset_refusal(host, function)):
        raise AllocationRefused(
            f"{address} is to be reset before each use, but {why}. "
            'Ask this node\'s administrator to set pre_start = "check" for it.'
        )
    try:
        with _only_method(host, path, sysfs.attribute(host, path / "reset_method")):
            host.local(path / "reset").write_text("1")
    except OSError as error:
        reason = reason_of(error)
        raise AllocationRefused(
            f"{address} could not be reset before its use: {reason}. Create the pod again."
        ) from error


@contextmanager
def _only_method(host: Host, path: HostPath, methods: str | None) -> Iterator[None]:
    """Allow the kernel no method but FLR meanwhile: it would try others next, among them a reset of the whole bus."""
    if methods in (None, "flr"):
        yield
        return
    file = host.local(path / "reset_method")
    file.write_text("flr")
    try:
        yield
    finally:
        file.write_text(str(methods))
