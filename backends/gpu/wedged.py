"""A DRM device that its driver gave up on: the kernel says so once, and keeps it nowhere.

Source: Documentation/gpu/drm-uapi.rst ("Device Wedging").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backends.base import Clears, Record, Signal, Verdict
from backends.linux import pci
from backends.linux.pci_health import LATCHED

FACT: Final = "WEDGED"
"""The property that makes an event of the subsystem `drm` a record of this (`Watches.facts`)."""

_UNTIL: Final = LATCHED - {Clears.RECOVERED}

_METHODS: Final = ("rebind", "bus-reset", "vendor-specific")


def signals(record: Record) -> Iterator[Signal]:
    """What an event says of the GPU that the device belongs to.

    `WEDGED=rebind,bus-reset` names what the device needs; with `none` its driver has recovered it.
    """
    methods, address = record.properties.get(FACT), pci.address_in(record.text)
    if not methods or methods == "none" or address is None:
        return
    known = [method for method in methods.split(",") if method in _METHODS]
    help_ = f"; the driver asks for {' or '.join(known)}" if known else ""
    yield Signal(f"pci:{address}", "wedged", Verdict.NOW, f"{address} hangs{help_}", clears_on=_UNTIL)
