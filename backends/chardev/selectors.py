"""What `usb` and `match` select devices by, and what is wrong with impossible selectors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import msgspec

Complaint = tuple[tuple[str, ...], str]
"""The key inside the selector, and a sentence that follows it."""

_USB_ID: Final = re.compile(r"(0x)?[0-9a-f]{1,4}", re.IGNORECASE)
_SUBSYSTEM: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class UsbOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which USB devices, as `lsusb` shows them; each that matches is a device of its own."""

    vendor: str | int
    """Hexadecimal, "0403" or "0x0403"; a number is refused, because nobody could tell how it is meant."""
    product: str | int | None = None
    """The same; by default any."""
    serial: str | None = None
    """By default any, or none."""


class MatchOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which of a subsystem's devices; all that is said must hold, and values may be globs."""

    subsystem: str
    """A directory of /sys/class or /sys/bus: "tty", "video4linux"."""
    properties: dict[str, str] = {}
    """The kernel's and udev's, as `udevadm info` shows them."""
    attributes: dict[str, str] = {}
    """Files of sysfs, each of the nearest device above that has it."""
    driver: str | None = None
    """That of the nearest device above that has one."""
    tags: list[str] = []
    """Set by udev's rules."""


def usb_id(written: str | int) -> str:
    """A vendor or product as sysfs has it, four hexadecimal digits in lower case."""
    return f"{int(str(written), 16):04x}"


def may_take_one_stick(one: UsbOption, other: UsbOption) -> bool:
    """Could both mean the same stick? Only of selectors that nothing is wrong with."""
    try:
        ids = [(usb_id(each.vendor), each.product and usb_id(each.product), each.serial) for each in (one, other)]
    except ValueError:
        return False
    return all(None in pair or len(set(pair)) == 1 for pair in zip(*ids, strict=True))


def usb_complaints(option: UsbOption) -> Iterator[Complaint]:
    """What is wrong with a selector of USB devices."""
    for key, written in (("vendor", option.vendor), ("product", option.product)):
        if isinstance(written, int):
            yield (key,), _number_complaint(written)
        elif written is not None and not _USB_ID.fullmatch(written):
            yield (key,), f"{written!r} is not one to four hexadecimal digits, as `lsusb` shows them"
    if option.serial is not None and (not option.serial.strip() or option.serial != option.serial.strip()):
        yield ("serial",), f"{option.serial!r} is empty or has spaces around it; leave it out to take any"


def _number_complaint(written: int) -> str:
    """An ID without quotes: TOML has read it as decimal, or as hexadecimal after 0x, and does not tell which."""
    digits = [f'"{written:04}" if these are the digits that `lsusb` shows'] if 0 <= written <= 9999 else []
    value = [f'"{written:04x}" if 0x{written:x} is meant'] if 0 <= written <= 0xFFFF else []
    if not value:
        return f"{written} is no USB ID; write its four hexadecimal digits in quotes, as `lsusb` shows them"
    return f"{written} is ambiguous without quotes; write {', or '.join(digits + value)}"


def match_complaints(option: MatchOption) -> Iterator[Complaint]:
    """What is wrong with a match of udev devices."""
    if not _SUBSYSTEM.fullmatch(option.subsystem):
        yield ("subsystem",), f"{option.subsystem!r} is not the name of a directory in /sys/class or /sys/bus"
    for name in option.attributes:
        if not name.isprintable() or not {"", ".", ".."}.isdisjoint(name.split("/")):
            yield ("attributes", name), f"{name!r} is not the path of a file below a device's directory"
