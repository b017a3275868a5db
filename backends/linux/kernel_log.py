"""Takes a line of the kernel's log apart: the device it is about, and the driver's own words.

Many lines quote what users choose: mount options, names of USB devices and of processes. So only the beginning of a line
proves that a driver wrote it. dev_printk puts `<driver> <device>: ` before the driver's text, and names the device in the
tags of the record, too, which no text in a line can forge (dev_printk_emit,
drivers/base/core.c; Documentation/ABI/testing/dev-kmsg).
"""

from __future__ import annotations

import re
from typing import Final

from backends.base import Record

_BEFORE: Final = re.compile(r"[^\s:]+ ([^\s]+): ")
"""What dev_printk puts before a message."""


def message(record: Record) -> str:
    """The line without the driver and device before it, if the tags of the record name that device."""
    device = device_of(record)
    found = _BEFORE.match(record.text) if device else None
    return record.text[found.end() :] if found is not None and found[1] == device else record.text


def device_of(record: Record) -> str:
    """The name of the device that the kernel says the line is about: `0000:3b:00.0`; empty if it names none."""
    subsystem, tag = record.properties.get("SUBSYSTEM", ""), record.properties.get("DEVICE", "")
    return tag.removeprefix(f"+{subsystem}:") if subsystem and tag.startswith(f"+{subsystem}:") else ""
