"""Tells which places an event is about, quickly where it is about none; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from backends.base import ALL, All, Device, Hint, HostPath, Known, LinkChange, PathChange, Uevent
from backends.infiniband.pools import PREFIX
from backends.linux import pci, rdma

_CLASSES: Final = frozenset({"infiniband", "infiniband_verbs", "infiniband_mad"})

SUBSYSTEMS: Final = _CLASSES | {"pci", "net", "misc"}
"""rdma_cm is a device of misc."""


def affected(hint: Hint, known: Known) -> Iterable[str] | All:
    """The units to look at again; those of pools begin with a prefix."""
    if isinstance(hint, LinkChange):
        return [unit for unit, device in _adapters(known) if hint.name in device.attributes.get("ifname", ())]
    if isinstance(hint, PathChange):
        return _with_node(hint.path, known)
    if hint.subsystem == "misc":
        return ALL if hint.name == "rdma_cm" else ()
    if hint.subsystem == "pci":
        return [unit for address in pci.affected(hint, known) for unit in (address, *_at(address, known))]
    places = list(_places(hint, known))
    return [*places, *(unit for unit in known if unit.startswith(PREFIX))] if places else ()


def _places(event: Uevent, known: Known) -> Iterator[str]:
    if event.subsystem in _CLASSES:
        yield (place := rdma.place_of(event.devpath))
        yield from _other_ports(place, known)
        if before := event.properties.get("DEVPATH_OLD"):
            yield rdma.place_of(before)
        if event.subsystem != "infiniband" and pci.address_in(event.devpath) is None:
            # a node without hardware: only a file tells its adapter
            yield from (
                unit for unit, devices in known.items() for device in devices if "function" not in device.attributes
            )
    elif event.subsystem == "net" and (on := pci.address_in(event.devpath)) is not None:
        yield from _at(on, known)


def _other_ports(place: str, known: Known) -> Iterator[str]:
    """The functions of the same card without an adapter: it may have begun or ended to be theirs, too (RoCE LAG)."""
    card = place.partition("/")[0].rpartition(".")[0]
    for unit, devices in known.items():
        if card and unit != place and unit.rpartition(".")[0] == card and any(device.unusable for device in devices):
            yield unit


def _at(address: str, known: Known) -> Iterable[str]:
    """The places at a PCI function, and those that depend on it."""
    return (unit for unit in known.minding(f"pci:{address}") if not unit.startswith(PREFIX))


def _with_node(path: HostPath, known: Known) -> list[str] | All:
    if path in (rdma.NODES, rdma.RDMA_CM):
        return ALL
    return [unit for unit, device in _adapters(known) if any(node.path == path for node in device.nodes)]


def _adapters(known: Known) -> Iterator[tuple[str, Device]]:
    return ((unit, device) for unit, devices in known.items() for device in devices if device.resource is None)
