"""Where devices are: machine → NUMA node → host bridge and PCI bridges → the devices below. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from agent.console.views import Device

_NUMBERS: Final = re.compile("([0-9]{1,18})")
_Rank = tuple[str, list[str | int]]
_STATES: Final = ("Healthy", "Degraded", "Unhealthy")


@dataclass(frozen=True, slots=True)
class Tile:
    """A device of a resource, with all its IDs, whatever states they are in."""

    resource: str
    views: tuple[Device, ...]
    """The worst first."""

    @property
    def worst(self) -> Device:
        """Of its views."""
        return self.views[0]

    @property
    def key(self) -> str:
        """The device's."""
        return self.worst.key


@dataclass(frozen=True, slots=True)
class Place:
    """A bridge, or several in a row that have nothing else below them, with all that is below."""

    bridges: tuple[str, ...]
    tiles: tuple[Tile, ...]
    below: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node; without a number, where the kernel names none."""

    number: int | None
    on_bus: bool
    """Whether it has devices on PCI; of others nothing is known but that they are there."""
    place: Place


def badness(state: str) -> int:
    """Rises from Healthy to Unhealthy."""
    return _STATES.index(state) if state in _STATES else len(_STATES)


def tiles(resource: str, devices: Iterable[Device]) -> Iterator[Tile]:
    """The devices of a resource, each once."""
    views: dict[str, list[Device]] = {}
    for device in devices:
        views.setdefault(device.key, []).append(device)
    for same in views.values():
        yield Tile(resource, tuple(sorted(same, key=lambda device: -badness(device.state))))


@dataclass(slots=True)
class _Growing:
    tiles: list[tuple[_Rank, Tile]] = field(default_factory=list)
    below: dict[str, _Growing] = field(default_factory=dict)

    def done(self, bridges: tuple[str, ...] = ()) -> Place:
        if bridges and not self.tiles and len(self.below) == 1:
            ((bridge, only),) = self.below.items()
            return only.done((*bridges, bridge))
        below = (inner.done((bridge,)) for bridge, inner in sorted(self.below.items()))
        return Place(bridges, tuple(tile for _, tile in sorted(self.tiles, key=lambda it: it[0])), tuple(below))


class Machine:
    """Where devices are, told of one after the other."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[bool, bool, int], _Growing] = {}

    def put(self, tile: Tile) -> None:
        """There is this one, too."""
        number, ancestry = tile.worst.numa_node, tile.worst.ancestry
        place = self._nodes.setdefault((number is None, not ancestry and number is None, number or 0), _Growing())
        for bridge in ancestry:
            place = place.below.setdefault(bridge, _Growing())
        place.tiles.append(((tile.resource, _natural(tile.key)), tile))

    def nodes(self) -> list[Node]:
        """By their numbers; then what is on no known node, then what is on no bus."""
        return [
            Node(None if unknown else number, not off_bus, grown.done())
            for (unknown, off_bus, number), grown in sorted(self._nodes.items(), key=lambda item: item[0])
        ]


def _natural(text: str) -> list[str | int]:
    """For sorting: numbers by their value, so that tty10 comes after tty9; not those of PCI addresses, in hexadecimal."""
    if ":" in text:
        return [text]
    return [int(part) if n % 2 else part for n, part in enumerate(_NUMBERS.split(text))]
