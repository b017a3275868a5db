"""Reads from sysfs which cards the AP bus of s390 has, of which kind, and which queues.

Files: Documentation/arch/s390 and drivers/s390/crypto of the kernel (ap_card.c, ap_queue.c, zcrypt_card.c, zcrypt_queue.c).
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath
from backends.linux import sysfs

DEVICES: Final = HostPath("/sys/devices/ap")
BUS: Final = HostPath("/sys/bus/ap")
ZCRYPT: Final = HostPath("/sys/class/zcrypt")
QUEUE_DRIVER: Final = "cex4queue"
"""The driver of zcrypt for cards from CEX4 on; queues for virtual machines are on `vfio_ap`."""

CARD: Final = re.compile("card([0-9a-f]{2})")
QUEUE: Final = re.compile(r"([0-9a-f]{2})\.([0-9a-f]{4})")

_TYPE: Final = re.compile("CEX([0-9]{1,2})([ACP])")
_MODES: Final = {"A": "accel", "C": "cca", "P": "ep11"}
_SYSINFO: Final = HostPath("/proc/sysinfo")
_MACHINE: Final = tuple(
    re.compile(rf"^{name}:[ \t]*(\S+)", re.MULTILINE) for name in ("Manufacturer", "Type", "Sequence Code")
)
"""Only the first match of each at the start of a line counts: the lines of LPARs and VMs below repeat such words."""


class Card(Struct, frozen=True):
    """A card, as one look found it."""

    name: str
    """`card01`"""
    type: str
    """As the kernel names it: `CEX8P`; empty if it does not."""
    generation: int = 0
    """0 for an unknown type."""
    mode: str = ""
    """`accel`, `cca` or `ep11`."""

    @property
    def path(self) -> HostPath:
        """Its directory."""
        return DEVICES / self.name

    @property
    def adapter(self) -> int:
        """Its number."""
        return int(self.name[4:], 16)


def cards(host: Host) -> list[str]:
    """The cards there are.

    Raises:
        OSError: they cannot be listed.
    """
    return [name for name in sysfs.entries(host, DEVICES) if CARD.fullmatch(name)]


def read(host: Host, name: str) -> Card | None:
    """A card; None if it is gone."""
    if not CARD.fullmatch(name) or not host.local(DEVICES / name).is_dir():
        return None
    kind = sysfs.attribute(host, DEVICES / name / "type") or ""
    if (known := _TYPE.fullmatch(kind)) is None:
        return Card(name, kind)
    return Card(name, kind, int(known[1]), _MODES[known[2]])


def queues(host: Host, card: Card) -> list[str]:
    """A card's queues: `01.0006`.

    Raises:
        OSError: they cannot be listed.
    """
    found = [name for name in sysfs.entries(host, card.path) if QUEUE.fullmatch(name)]
    return [name for name in found if name.startswith(card.name[4:])]


def domain(queue: str) -> int:
    """The number of a queue's domain."""
    return int(queue[3:], 16)


def machine(host: Host) -> str | None:
    """What tells this machine from others; None where the kernel does not say."""
    text = sysfs.text(host, _SYSINFO) or ""
    parts = [found[1] for pattern in _MACHINE if (found := pattern.search(text)) is not None]
    return "-".join(parts) if len(parts) == len(_MACHINE) else None
