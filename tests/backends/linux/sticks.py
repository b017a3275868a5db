"""USB devices for fixture trees, written as sysfs shows them."""

from __future__ import annotations

from pathlib import Path

CONTROLLER = "devices/pci0000:00/0000:00:14.0"
ROOT_HUB = f"""
sys/{CONTROLLER}/numa_node = 1
sys/{CONTROLLER}/usb1/version = 2.00
sys/{CONTROLLER}/usb2/version = 3.10
"""


def directory(port: str) -> str:
    """Where a stick's directory is, below /sys."""
    bus, _, ports = port.partition("-")
    steps = ports.split(".")
    chain = "/".join(f"{bus}-{'.'.join(steps[: n + 1])}" for n in range(len(steps)))
    return f"{CONTROLLER}/usb{bus}/{chain}"


def stick(
    port: str, number: int, vendor: str = "0403", product: str = "6001", serial: str | None = None, *, dev: bool = True
) -> str:
    """A stick, its node in /dev (root only) included; a USB device's minor is 128 for each bus and one for each number."""
    bus = int(port.partition("-")[0])
    minor, at = (bus - 1) * 128 + number - 1, f"sys/{directory(port)}"
    name = f"bus/usb/{bus:03}/{number:03}"
    lines = [
        f"sys/bus/usb/devices/{port} -> ../../../{directory(port)}",
        f"{at}/busnum = {bus}",
        f"{at}/devnum = {number}",
        f"{at}/idVendor = {vendor}",
        f"{at}/idProduct = {product}",
        f"{at}/dev = 189:{minor}",
        f"{at}/subsystem -> ../../../../../../bus/usb",
        f"{at}/uevent = DEVNAME={name}",
        *([f"{at}/serial = {serial}"] if serial is not None else []),
        *([f"dev/{name} c 189:{minor}"] if dev else []),
    ]
    return "\n".join((ROOT_HUB, *lines, ""))


def function(port: str, below: str, subsystem: str, name: str, numbers: str, *, dev: bool = True) -> str:
    """A node that a driver made below one of the stick's interfaces."""
    at, kind = f"sys/{directory(port)}/{below}", "b" if subsystem == "block" else "c"
    lines = [f"{at}/dev = {numbers}", f"{at}/subsystem -> /sys/class/{subsystem}", f"{at}/uevent = DEVNAME={name}"]
    return "\n".join((*lines, *([f"dev/{name} {kind} {numbers}"] if dev else []), ""))


def tty(port: str, name: str, numbers: str, *, dev: bool = True) -> str:
    """What ftdi_sio makes."""
    return function(port, f"{port}:1.0/{name}/tty/{name}", "tty", name, numbers, dev=dev)


def describe(root: Path, port: str, serial_index: int) -> None:
    """The stick's device descriptor, which is no text."""
    (root / "sys" / directory(port) / "descriptors").write_bytes(bytes([18, 1, *[0] * 14, serial_index, 1]))


def device_number(port: str, below: str, numbers: str) -> str:
    """The link by which a node's number leads to its device."""
    return f"sys/dev/char/{numbers} -> ../../{directory(port)}/{below}\n"


def record(root: Path, name: str, *lines: str) -> None:
    """What udev has written down of a device."""
    path = root / "run/udev/data" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
