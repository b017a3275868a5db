"""Makes a device of each queue that a resource names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from backends.base import NUMBER, TEXT, Device, Discovery, Host, Problem, one_of
from backends.cex import ap_bus
from backends.cex.ap_bus import Card
from backends.cex.options import Apqn, CexOptions, CexResource
from backends.linux import sysfs

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
    card = ap_bus.read(host, unit)
    if card is None:
        return Discovery()
    problems = (
        [] if card.generation else [Problem(unit, f"{unit} is of a type that is not known: {card.type or '(none)'}")]
    )
    machine = ap_bus.machine(host)
    devices: list[Device] = []
    beside: list[Device] = []
    for queue in ap_bus.queues(host, card):
        takers = [r for r in resources if names(r.spec.options, card.adapter, ap_bus.domain(queue), machine)]
        why = _obstacle(host, card, queue)
        devices += [_device(card, queue, it.name, why or _mismatch(card, it.spec.options)) for it in takers]
        beside += [] if takers else [_device(card, queue, None, why)]
    return Discovery(tuple(devices), problems=tuple(problems), beside=tuple(beside))


def names(options: CexOptions, adapter: int, domain: int, machine: str | None) -> bool:
    """Does the resource name this queue, on this machine?"""
    return not {Apqn(adapter, domain), Apqn(adapter, domain, machine)}.isdisjoint(options.apqns)


def hardware(queue: str) -> str:
    """The name of a queue or a card as hardware."""
    return f"ap:{queue}"


def _device(card: Card, queue: str, resource: str | None, unusable: str) -> Device:
    domain = ap_bus.domain(queue)
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
    if driver != ap_bus.QUEUE_DRIVER:
        return f"it is on {driver or 'no driver'}, not on {ap_bus.QUEUE_DRIVER} (see apmask and aqmask in {ap_bus.BUS})"
    if not host.local(ap_bus.ZCRYPT).is_dir():
        return f"the kernel can make no zcrypt nodes ({ap_bus.ZCRYPT}): it needs Linux 4.20 and CONFIG_ZCRYPT_MULTIDEVNODES"
    return ""


def _mismatch(card: Card, options: CexOptions) -> str:
    """Why a resource does not take a queue that it names."""
    if options.mode not in ("any", card.mode):
        return f"its card is in mode {card.mode}, not {options.mode}"
    if card.generation < (options.min_generation or 0):
        return f"its card is a {card.type}, older than generation {options.min_generation}"
    return ""
