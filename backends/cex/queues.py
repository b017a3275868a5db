"""Finds the queues of a card and makes devices of those that a resource names; says how a queue and its card are.

Files: Documentation/arch/s390 and drivers/s390/crypto of the kernel (ap_card.c, ap_queue.c, zcrypt_card.c, zcrypt_queue.c).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

from backends.base import NUMBER, TEXT, Device, Discovery, Host, HostPath, Problem, Signal, Verdict, one_of
from backends.cex.options import Apqn, CexOptions, CexResource
from backends.linux import sysfs

# --- the AP bus ---


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


def read_card(host: Host, name: str) -> Card | None:
    """A card; None if it is gone."""
    if not CARD.fullmatch(name) or not host.local(DEVICES / name).is_dir():
        return None
    kind = sysfs.attribute(host, DEVICES / name / "type") or ""
    if (known := _TYPE.fullmatch(kind)) is None:
        return Card(name, kind)
    return Card(name, kind, int(known[1]), _MODES[known[2]])


def queues_of(host: Host, card: Card) -> list[str]:
    """A card's queues: `01.0006`.

    Raises:
        OSError: they cannot be listed.
    """
    found = [name for name in sysfs.entries(host, card.path) if QUEUE.fullmatch(name)]
    return [name for name in found if name.startswith(card.name[4:])]


def domain_of(queue: str) -> int:
    """The number of a queue's domain."""
    return int(queue[3:], 16)


def machine_id(host: Host) -> str | None:
    """What tells this machine from others; None where the kernel does not say."""
    text = sysfs.text(host, _SYSINFO) or ""
    parts = [found[1] for pattern in _MACHINE if (found := pattern.search(text)) is not None]
    return "-".join(parts) if len(parts) == len(_MACHINE) else None


# --- devices ---


ATTRIBUTES: Final = {
    "apqn": TEXT,
    "adapter": NUMBER,
    "domain": NUMBER,
    "model": TEXT,
    "generation": NUMBER,
    "mode": one_of("accel", "cca", "ep11"),
}


def find(host: Host, resources: Iterable[CexResource], unit: str) -> Discovery:
    """The queues of a card: one device for each resource that names it; those that none names are `beside`."""
    card = read_card(host, unit)
    if card is None:
        return Discovery()
    problems = (
        [] if card.generation else [Problem(unit, f"{unit} is of a type that is not known: {card.type or '(none)'}")]
    )
    machine = machine_id(host)
    devices: list[Device] = []
    beside: list[Device] = []
    for queue in queues_of(host, card):
        takers = [r for r in resources if names(r.spec.options, card.adapter, domain_of(queue), machine)]
        why = _obstacle(host, card, queue)
        devices += [_device(card, queue, it.name, why or _mismatch(card, it.spec.options)) for it in takers]
        beside += [] if takers else [_device(card, queue, None, why)]
    return Discovery(tuple(devices), problems=tuple(problems), beside=tuple(beside))


def names(options: CexOptions, adapter: int, domain: int, machine: str | None) -> bool:
    """Whether the resource names this queue, on this machine."""
    return not {Apqn(adapter, domain), Apqn(adapter, domain, machine)}.isdisjoint(options.apqns)


def hardware(queue: str) -> str:
    """The name of a queue or a card as hardware."""
    return f"ap:{queue}"


def _device(card: Card, queue: str, resource: str | None, unusable: str) -> Device:
    domain = domain_of(queue)
    told = {
        "apqn": queue,
        "adapter": str(card.adapter),
        "domain": str(domain),
        "model": card.type,
        "generation": str(card.generation or ""),
        "mode": card.mode,
    }
    return Device(
        key=f"apqn-{card.adapter}-{domain}",
        unit=card.name,
        resource=resource,
        hardware=frozenset({hardware(queue)}),
        depends=frozenset({hardware(card.name)}),
        identity=card.type,
        unusable=unusable,
        attributes={name: (value,) for name, value in told.items() if value},
    )


def _obstacle(host: Host, card: Card, queue: str) -> str:
    """Why no container can have the queue as it is."""
    if not card.generation:
        return f"its card is of a type that is not known: {card.type or '(none)'}"
    driver = sysfs.linked_name(host, card.path / queue / "driver")
    if driver != QUEUE_DRIVER:
        return f"it is on {driver or 'no driver'}, not on {QUEUE_DRIVER} (see apmask and aqmask in {BUS})"
    if not host.local(ZCRYPT).is_dir():
        return f"the kernel can make no zcrypt nodes ({ZCRYPT}): it needs Linux 4.20 and CONFIG_ZCRYPT_MULTIDEVNODES"
    return ""


def _mismatch(card: Card, options: CexOptions) -> str:
    """Why a resource does not take a queue that it names."""
    if options.mode not in ("any", card.mode):
        return f"its card is in mode {card.mode}, not {options.mode}"
    if card.generation < (options.min_generation or 0):
        return f"its card is a {card.type}, older than generation {options.min_generation}"
    return ""


# --- health ---


def signals(host: Host, card: str, queue: str) -> Iterator[Signal]:
    """What is wrong now. A missing file means nothing: `config` came with Linux 5.13, `chkstop` with 5.17."""
    for name, path in ((card, DEVICES / card), (queue, DEVICES / card / queue)):
        it = hardware(name)
        if sysfs.attribute(host, path / "config") == "0":
            yield Signal(
                it, "deconfigured", Verdict.NOW, f"{name} is deconfigured: the machine's operator took it away"
            )
        if sysfs.attribute(host, path / "chkstop") == "1":
            yield Signal(it, "checkstop", Verdict.NOW, f"{name} is in checkstop state: its hardware has failed")
        online = sysfs.attribute(host, path / "online")
        if online is not None and not online.startswith("1"):
            yield Signal(it, "offline", Verdict.NOW, f"{name} is offline: write 1 into {path}/online")
