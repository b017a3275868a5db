"""Reads USB devices from sysfs: what a stick is, where it is plugged in, and the device nodes it has.

A stick is known by its port: `1-2.3` is port 3 of the hub at port 2 of bus 1; a root hub is `usb1`. The kernel may
number the buses otherwise after a reboot, so that a name which must last is built on the controller (`place`).
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath
from backends.errors import reason_of
from backends.linux import sysfs
from backends.linux.sysfs import KernelNode

DIRECTORY: Final = HostPath("/sys/bus/usb/devices")

_ROOT_HUB: Final = re.compile(r"usb[1-9]\d*")
_BEHIND: Final = re.compile(r"[1-9]\d*-[1-9]\d*(\.[1-9]\d*)*")
_INTERFACE: Final = re.compile(rf"{_BEHIND.pattern}:\d+\.\d+")
_ID: Final = re.compile(r"[0-9a-f]{4}")
_LOOKS: Final = 3  # at a stick that changes while it is read
_SERIAL_INDEX: Final = 16  # iSerialNumber in the device descriptor (USB 2.0, table 9-8); 0: it has none


class UsbDevice(Struct, frozen=True):
    """A stick, a hub or any other USB device, as one look found it; None or "" is what is not known."""

    port: str
    path: HostPath
    """Its directory in /sys/devices."""
    place: str | None
    """The port under a name that never changes: `0000:00:14.0-usbv2-2.3` is port 2.3 of that controller's USB 2 root hub."""
    places: frozenset[str]
    """As `places` says it."""
    bus: int
    number: int
    """Its number on the bus, which changes each time it is plugged in."""
    vendor: str
    """Four hexadecimal digits in lower case."""
    product: str
    serial: str | None
    serial_fault: str | None
    """Why its serial is not known although it has one; the end of a sentence."""
    manufacturer: str
    name: str
    speed: str
    """In Mbit/s."""
    connected: int | None
    """Milliseconds since it was plugged in."""
    numa_node: int | None
    nodes: tuple[KernelNode, ...]
    """Its own in /dev/bus/usb, and those of its functions: tty, hidraw, input, video4linux and so on."""


def is_port(name: str) -> bool:
    """Whether a name is that of a USB device, and not of an interface of one."""
    return _BEHIND.fullmatch(name) is not None or _ROOT_HUB.fullmatch(name) is not None


def is_interface(name: str) -> bool:
    """Whether a name is that of an interface of a USB device: `1-2.3:1.0`."""
    return _INTERFACE.fullmatch(name) is not None


def port_of(devpath: str) -> str | None:
    """The USB device that a device below /sys/devices is or belongs to: the deepest on its path."""
    found = None
    for part in devpath.split("/"):
        if _ROOT_HUB.fullmatch(part) or (found and _BEHIND.fullmatch(part)):
            found = part
    return found


def ports(host: Host) -> list[str]:
    """All USB devices there are.

    Raises:
        OSError: they cannot be listed; a host without USB has none.
    """
    return [name for name in sysfs.entries(host, DIRECTORY) if is_port(name)]


def read(host: Host, port: str) -> UsbDevice | None:
    """The device at a port; None if there is none, or if it changes faster than it can be read."""
    for _ in range(_LOOKS):
        path = sysfs.device(host, DIRECTORY / port)
        before = _enumeration(host, port)
        if path is None or before is None:
            return None
        found = _read(host, port, path, *before)
        # each enumeration gives another number: what was read between two equal ones is of one stick
        if _enumeration(host, port) == before:
            return found
    return None


def ids(host: Host, port: str) -> tuple[str | None, str | None]:
    """Vendor and product at a port: much cheaper than `read`, to pass over other devices."""
    return _usb_id(host, DIRECTORY / port / "idVendor"), _usb_id(host, DIRECTORY / port / "idProduct")


def identity(host: Host, path: HostPath) -> str:
    """What a stick in this directory is: vendor, product and serial, as `0403:6001:A50285BI`."""
    told = (_usb_id(host, path / "idVendor"), _usb_id(host, path / "idProduct"), _serial(host, path)[0])
    return ":".join(text or "" for text in told)


def places(host: Host, path: HostPath) -> frozenset[str]:
    """Where a stick in this directory is plugged in, as `Device.place`: its port, and the one that shares the socket.

    A socket of USB 3 has a port on each of two root hubs, and a stick may be at the other one once it has firmware
    (Movidius). The kernel links them, `peer` (drivers/usb/core/port.c), some time after it has told of the stick.
    """
    found = {_place(host, path) or path.name}
    if peer := sysfs.target(host, path / "port"):
        peer = sysfs.target(host, peer / "peer")
    if peer and (hub := _place(host, peer.parent.parent)):  # …/usb2/2-0:1.0/usb2-port1
        number = peer.name.rpartition("-port")[2]
        found.add(f"{hub}{'-' if _ROOT_HUB.fullmatch(peer.parent.parent.name) else '.'}{number}")
    return frozenset(f"usb:{place}" for place in found)


def _enumeration(host: Host, port: str) -> tuple[int, int] | None:
    bus, number = (sysfs.number(host, DIRECTORY / port / name) for name in ("busnum", "devnum"))
    return None if bus is None or number is None else (bus, number)


def _read(host: Host, port: str, path: HostPath, bus: int, number: int) -> UsbDevice | None:
    vendor, product = (_usb_id(host, path / name) for name in ("idVendor", "idProduct"))
    if vendor is None or product is None:
        return None
    serial, fault = _serial(host, path)
    manufacturer, name, speed = (
        sysfs.attribute(host, path / name) or "" for name in ("manufacturer", "product", "speed")
    )
    return UsbDevice(
        port=port,
        path=path,
        place=_place(host, path),
        places=places(host, path),
        bus=bus,
        number=number,
        vendor=vendor,
        product=product,
        serial=serial,
        serial_fault=fault,
        manufacturer=manufacturer,
        name=name,
        speed=speed,
        connected=sysfs.number(host, path / "power/connected_duration"),
        numa_node=sysfs.numa_node(host, path),
        nodes=tuple(sysfs.nodes_below(host, path, is_port)),
    )


def _usb_id(host: Host, path: HostPath) -> str | None:
    text = (sysfs.attribute(host, path) or "").lower()
    return text if _ID.fullmatch(text) else None


def _serial(host: Host, path: HostPath) -> tuple[str | None, str | None]:
    """The serial if it can be read; else why not, if it has one."""
    try:
        text = sysfs.read_bytes(host, path / "serial").decode(errors="replace").strip()
    except FileNotFoundError:
        return None, "the kernel could not read it when the device was plugged in" if _says_serial(host, path) else None
    except OSError as error:
        return None, reason_of(error)
    if not text.isprintable() or "\N{REPLACEMENT CHARACTER}" in text:
        return None, f"{text!r} has characters that cannot be printed"
    return text or None, None


def _says_serial(host: Host, path: HostPath) -> bool:
    """Whether the descriptor says that there is a serial."""
    try:
        descriptor = sysfs.read_bytes(host, path / "descriptors")
    except OSError:
        return False
    return len(descriptor) > _SERIAL_INDEX and descriptor[_SERIAL_INDEX] != 0


def _place(host: Host, path: HostPath) -> str | None:
    """Controller, root hub with its USB version (a controller may have several), and ports from there."""
    for up in sysfs.above(path):
        if not _ROOT_HUB.fullmatch(up.name):
            continue
        version = (sysfs.attribute(host, up / "version") or "").partition(".")[0]
        if not version.isdigit():
            return None
        root = f"{up.parent.name}-usbv{version}"
        return root if up == path else f"{root}-{path.name.partition('-')[2]}"
    return None
