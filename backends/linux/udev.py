"""Reads devices that have a node: what the kernel says in sysfs, and what udevd has written into its database.

udevd keeps a text file for each device, `/run/udev/data/c188:0`, one fact a line: `E:` a property, `Q:` a tag that
holds (`G:` one that ever held; all that older versions write), `S:` a link below /dev, `V:` the format's version.
Reading it takes no libudev, and works on a host seen from a container.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath
from backends.errors import not_short
from backends.linux import files, sysfs
from backends.linux.sysfs import KernelNode

DATABASE: Final = HostPath("/run/udev/data")

_ENTRY: Final = re.compile(r"([bc])(\d{1,10}:\d{1,10})")
_MOST: Final = 1 << 20  # bytes of an entry; it has some kilobytes
_USB_FACTS: Final = {"ID_VENDOR_ID": "idVendor", "ID_MODEL_ID": "idProduct", "ID_USB_SERIAL_SHORT": "serial"}
"""Property → the file of a stick from which udev's usb_id copies it."""


class UdevDevice(Struct, frozen=True):
    """A device that has a node, as one look found it."""

    path: HostPath
    """Its directory in /sys/devices."""
    node: KernelNode
    properties: Mapping[str, str]
    """Those of the kernel, and those of udev if it has an entry for the device."""
    tags: frozenset[str]
    links: tuple[str, ...]
    """The links that udev makes below /dev, sorted."""
    recorded: bool
    """Whether udev has an entry for it."""


def entry_number(name: str) -> str | None:
    """The device number, as in `DeviceNode.number`, of a file in the database."""
    found = _ENTRY.fullmatch(name)
    return f"{found[1]}:{found[2]}" if found else None


def has_database(host: Host) -> bool:
    """Whether a udevd keeps a database."""
    return host.local(DATABASE).is_dir()


def numbers(host: Host, subsystem: str) -> list[str] | None:
    """The numbers of a subsystem's devices that have a node; None if there is no such subsystem.

    A bus and a class may have one name: `gpio` is the bus of the chips, which have nodes, and the class of the old interface,
    which has none (gpiochip_setup_dev and gpio_class, drivers/gpio).

    Raises:
        OSError: they cannot be listed.
    """
    found: list[str] | None = None
    for directory in (HostPath(f"/sys/class/{subsystem}"), HostPath(f"/sys/bus/{subsystem}/devices")):
        try:
            names = sorted(entry.name for entry in host.local(directory).iterdir())
        except FileNotFoundError:
            continue
        except OSError as error:
            raise not_short(error) from None
        kind = "b" if subsystem == "block" else "c"
        devs = (sysfs.attribute(host, directory / name / "dev") for name in names)
        found = [*(found or ()), *(f"{kind}:{number}" for number in devs if number)]
    return found


def read(host: Host, number: str) -> UdevDevice | None:
    """The device of a number, `c:188:0`; None if there is none."""
    kind, _, numbers = number.partition(":")
    path = sysfs.device(host, HostPath(f"/sys/dev/{'block' if kind == 'b' else 'char'}/{numbers}"))
    node = sysfs.node(host, path) if path else None
    if path is None or node is None or node.number != number:
        return None
    record = _record(host, HostPath(f"{DATABASE}/{kind}{numbers}"))
    if record is not None and not _is_of(host, path, record):
        record = None
    own = sysfs.properties(host, path) | {"SUBSYSTEM": node.subsystem, "DEVPATH": path.text.removeprefix("/sys")}
    return UdevDevice(
        path=path,
        node=node,
        properties=_properties(record or ()) | own,
        tags=_tags(record or ()),
        links=tuple(sorted(_values(record or (), "S"))),
        recorded=record is not None,
    )


def links(host: Host, number: str) -> Iterator[str]:
    """The links below /dev that udev's entry for a device number names; several devices may claim one of them."""
    return _values(_record(host, DATABASE / number.replace(":", "", 1)) or (), "S")


def attribute(host: Host, device: HostPath, name: str) -> str | None:
    """An attribute of the nearest device above that has it."""
    return next((text for up in sysfs.above(device) if (text := sysfs.attribute(host, up / name)) is not None), None)


def driver(host: Host, device: HostPath) -> str | None:
    """The driver of the nearest device above that has one."""
    return next((name for up in sysfs.above(device) if (name := sysfs.linked_name(host, up / "driver"))), None)


def _record(host: Host, path: HostPath) -> list[str] | None:
    try:
        return files.read(host.local(path), _MOST, follow=False).decode(errors="replace").splitlines()
    except OSError as error:
        not_short(error)
        return None


def _is_of(host: Host, device: HostPath, record: Iterable[str]) -> bool:
    """Whether the entry is about this device, and not an earlier one with the same number.

    Until udevd has handled the kernel's event, some 20 ms later, the entry is that of a stick that is gone.
    """
    said = _properties(record)
    if said.get("ID_BUS") != "usb":
        return True
    stick = next((up for up in sysfs.above(device) if sysfs.attribute(host, up / "idVendor") is not None), None)
    return stick is not None and all(
        name not in said or _plain(sysfs.attribute(host, stick / file) or "") == _plain(said[name])
        for name, file in _USB_FACTS.items()
    )


def _plain(text: str) -> str:
    """A text as both write it: usb_id writes "_" for white space and for what it does not allow in a name."""
    return re.sub(r"[\W_]+", "_", text.lower(), flags=re.ASCII).strip("_")


def _values(record: Iterable[str], letter: str) -> Iterator[str]:
    return (line[2:] for line in record if line.startswith(f"{letter}:"))


def _properties(record: Iterable[str]) -> dict[str, str]:
    return dict(value.split("=", 1) for value in _values(record, "E") if "=" in value)


def _tags(record: Iterable[str]) -> frozenset[str]:
    record = list(record)
    return frozenset(_values(record, "Q" if any(_values(record, "V")) else "G"))
