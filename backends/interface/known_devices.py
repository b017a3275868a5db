"""What the last look at a kind of hardware found, and whom a piece of that hardware concerns."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, MutableMapping

from backends.interface.host import HostPath
from backends.interface.values import Device


class Known(MutableMapping[str, tuple[Device, ...]]):
    """Unit → its devices, and hardware → the units it concerns; discovery writes it, backends read it.

    `Backend.affects` is asked for every event on the node: the way from hardware to units must not be a search.
    """

    __slots__ = ("_minding", "_units")

    def __init__(self, units: Mapping[str, tuple[Device, ...]] | None = None) -> None:
        self._units: dict[str, tuple[Device, ...]] = {}
        self._minding: dict[str, tuple[str, ...]] = {}
        self.update(units or {})

    def copy(self) -> Known:
        """The same, to go on from."""
        other = Known()
        other._units, other._minding = self._units.copy(), self._minding.copy()
        return other

    def minding(self, hardware: str) -> tuple[str, ...]:
        """The units with a device that owns this hardware or depends on it."""
        return self._minding.get(hardware, ())

    def having_node(self, path: HostPath) -> list[str]:
        """The units with a device that has this node, or has one in this directory."""
        return [
            unit
            for unit, devices in self._units.items()
            if any(node.path == path or node.path.parent == path for device in devices for node in device.nodes)
        ]

    def items(self) -> ItemsView[str, tuple[Device, ...]]:
        """As a dictionary's, which are ten times as fast as a mapping's; there may be 10,000 units."""
        return self._units.items()

    def keys(self) -> KeysView[str]:
        """The same."""
        return self._units.keys()

    def __getitem__(self, unit: str) -> tuple[Device, ...]:
        return self._units[unit]

    def __setitem__(self, unit: str, devices: tuple[Device, ...]) -> None:
        before, after = _minded(self._units.get(unit, ())), _minded(devices)
        self._units[unit] = devices
        self._forget(unit, before - after)
        for hardware in after - before:
            self._minding[hardware] = (*self._minding.get(hardware, ()), unit)

    def __delitem__(self, unit: str) -> None:
        self._forget(unit, _minded(self._units.pop(unit)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def _forget(self, unit: str, minded: frozenset[str]) -> None:
        for hardware in minded:
            if others := tuple(other for other in self._minding[hardware] if other != unit):
                self._minding[hardware] = others
            else:
                del self._minding[hardware]


def _minded(devices: tuple[Device, ...]) -> frozenset[str]:
    return frozenset[str]().union(*(device.hardware | device.depends for device in devices))
