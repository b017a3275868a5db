"""Tells which PCI functions are GPUs, cheaply: by class and vendor alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from backends.base import Host, HostPath
from backends.linux import pci, sysfs

NVIDIA: Final = "10de"
AMD: Final = "1002"
INTEL: Final = "8086"

_DISPLAY: Final = "03"  # the base classes of PCI Code and ID Assignment: display controller
_ACCELERATOR: Final = "12"  # processing accelerator, as AMD's Instinct cards since MI300 say; Intel's are NPUs

_HEXADECIMAL: Final = re.compile("0x(?:[0-9a-f]{4}|[0-9a-f]{6})")  # a vendor, a class


def is_gpu(vendor: str, kind: str) -> bool:
    """Is a function of this vendor and class one that this backend can hand out?"""
    if kind.startswith(_ACCELERATOR):
        return vendor == AMD
    return vendor in (NVIDIA, AMD, INTEL) and kind.startswith(_DISPLAY)


def addresses(host: Host) -> Iterator[tuple[str, str]]:
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
