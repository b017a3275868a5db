"""Where devices are: machine → NUMA node → PCI bridges that several devices are below → the devices. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct, field

from agent.console.views import Device, Unclaimed

NOT_OFFERED: Final = "Not offered"
"""The state, on the page alone, of a device that its resource is meant to have and no pod can get."""

_NUMBERS: Final = re.compile("([0-9]{1,18})")
_Rank = tuple[str, list[str | int]]
_STATES: Final = ("Healthy", "Drained", "Degraded", NOT_OFFERED, "Unhealthy")


class Tile(Struct, frozen=True):
    """A device that is a resource's, or meant to be, with all its IDs, whatever states they are in."""

    resource: str
    views: tuple[Device, ...]
    """The worst first."""

    @property
    def worst(self) -> Device:
        """The view in the worst state."""
        return self.views[0]

    @property
    def key(self) -> str:
        """The device's key."""
        return self.worst.key

    @property
    def title(self) -> str:
        """What people call it: `H100 · nvidia3`; its key, if it has neither model nor name."""
        return " · ".join(filter(None, (self.worst.model, self.worst.name))) or self.key

    @property
    def names(self) -> frozenset[str]:
        """What the log calls it."""
        return frozenset({self.key, self.worst.name, *(it for device in self.views for it in device.ids[:1])} - {""})

    @property
    def beneath(self) -> frozenset[str]:
        """Its hardware, and the PCI functions that it is a part of or below."""
        return frozenset((*self.worst.hardware, *(f"pci:{it}" for it in self.worst.ancestry)))

    @property
    def missing(self) -> bool:
        """Whether no pod can get it."""
        return self.worst.state == NOT_OFFERED


class Place(Struct, frozen=True):
    """A bridge that more than one device is below, with all that is below."""

    tiles: tuple[Tile, ...]
    """Also those below a bridge of their own: a switch has one for each."""
    below: tuple[Place, ...]


class Node(Struct, frozen=True):
    """A NUMA node; without a number, where the kernel names none."""

    number: int | None
    on_bus: bool
    """Whether it has devices on PCI; of others nothing is known but that they are there."""
    place: Place


def badness(state: str) -> int:
    """How bad a state is: the higher, the worse."""
    return _STATES.index(state) if state in _STATES else len(_STATES)


def tiles(resource: str, devices: Iterable[Device]) -> Iterator[Tile]:
    """The devices of a resource, each once."""
    views: dict[str, list[Device]] = {}
    for device in devices:
        views.setdefault(device.key, []).append(device)
    for same in views.values():
        yield Tile(resource, tuple(sorted(same, key=lambda device: -badness(device.condition))))


def missing(unclaimed: Iterable[Unclaimed]) -> Iterator[Tile]:
    """Tiles of the devices that resources are meant to have and no pod can get."""
    for it in unclaimed:
        if it.resource:
            view = Device(
                it.device, it.ids, NOT_OFFERED, it.reason, it.why, it.since, it.numa_node, it.ancestry, it.hardware,
                name=it.name, model=it.model,
            )  # fmt: skip
            yield Tile(it.resource, (view,))


def in_order(every: Iterable[Tile]) -> Iterator[Tile]:
    """The same tiles as the page draws them: by NUMA node, bridge, resource and address."""
    where = Machine()
    for tile in every:
        where.put(tile)
    for node in where.nodes():
        yield from _within(node.place)


def _within(place: Place) -> Iterator[Tile]:
    yield from place.tiles
    for inner in place.below:
        yield from _within(inner)


class _Growing(Struct):
    tiles: list[tuple[_Rank, Tile]] = field(default_factory=list)
    below: dict[str, _Growing] = field(default_factory=dict)

    def gather(self) -> None:
        """Take what is alone below its bridges; leave out a bridge that only another one is below."""
        below: dict[str, _Growing] = {}
        for bridge, inner in self.below.items():
            inner.gather()
            if len(inner.tiles) == 1 and not inner.below:
                self.tiles += inner.tiles
            elif not inner.tiles and len(inner.below) == 1:
                (below[bridge],) = inner.below.values()
            else:
                below[bridge] = inner
        self.below = below

    def done(self) -> Place:
        tiles = sorted(self.tiles, key=lambda it: it[0])
        return Place(tuple(tile for _, tile in tiles), tuple(inner.done() for _, inner in sorted(self.below.items())))


class Machine:
    """Collects tiles by where their devices are."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[bool, bool, int], _Growing] = {}

    def put(self, tile: Tile) -> None:
        """Add a tile. A host bridge makes no place: too much is below it on most machines."""
        number, ancestry = tile.worst.numa_node, tile.worst.ancestry
        place = self._nodes.setdefault((number is None, not ancestry and number is None, number or 0), _Growing())
        for bridge in ancestry[1:]:
            place = place.below.setdefault(bridge, _Growing())
        place.tiles.append((_rank(tile), tile))

    def nodes(self) -> list[Node]:
        """The NUMA nodes by their numbers; then the devices on no known node, then those on no bus."""
        for grown in self._nodes.values():
            grown.gather()
        return [
            Node(None if unknown else number, not off_bus, grown.done())
            for (unknown, off_bus, number), grown in sorted(self._nodes.items(), key=lambda item: item[0])
        ]


def _rank(tile: Tile) -> _Rank:
    """Its place in the order: by PCI address, which stays when the driver names the device otherwise."""
    address = next((it for it in tile.worst.hardware if it.startswith("pci:")), "")
    return tile.resource, _natural(address or tile.worst.name or tile.key)


def _natural(text: str) -> list[str | int]:
    """For sorting: numbers by their value, so that tty10 comes after tty9; not those of PCI addresses, in hexadecimal."""
    if ":" in text:
        return [text]
    return [int(part) if n % 2 else part for n, part in enumerate(_NUMBERS.split(text))]
