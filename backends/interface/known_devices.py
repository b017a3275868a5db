"""What the last look at a kind of hardware found, and which units a piece of hardware concerns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backends.interface.host import HostPath
from backends.interface.values import Device


class Known(dict[str, tuple[Device, ...]]):
    """Unit → its devices, with an index from hardware to units. Discovery writes it, by `[…] =` and `del` alone.

    `Backend.affects` is asked for every event on the node: the way from hardware to units must not be a search.
    """

    __slots__ = ("_minding",)

    def __init__(self, units: Mapping[str, tuple[Device, ...]] | None = None) -> None:
        super().__init__()
        self._minding: dict[str, tuple[str, ...]] = {}
        for unit, devices in (units or {}).items():
            self[unit] = devices

    def copy(self) -> Known:
        """Its own copy, to go on from."""
        other = Known()
        dict.update(other, self)
        other._minding = self._minding.copy()
        return other

    def minding(self, hardware: str) -> tuple[str, ...]:
        """The units with a device that owns this hardware or depends on it."""
        return self._minding.get(hardware, ())

    def having_node(self, path: HostPath) -> list[str]:
        """The units with a device that has this node, or has one in this directory."""
        return [
            unit
            for unit, devices in self.items()
            if any(node.path == path or node.path.parent == path for device in devices for node in device.nodes)
        ]

    def __setitem__(self, unit: str, devices: tuple[Device, ...]) -> None:
        before, after = minded(self.get(unit, ())), minded(devices)
        super().__setitem__(unit, devices)
        for hardware in before - after:
            self._forget(unit, hardware)
        for hardware in after - before:
            self._minding[hardware] = (*self._minding.get(hardware, ()), unit)

    def __delitem__(self, unit: str) -> None:
        for hardware in minded(self[unit]):
            self._forget(unit, hardware)
        super().__delitem__(unit)

    pop = popitem = setdefault = update = clear = None  # type: ignore[assignment]  # they would pass by the index

    def _forget(self, unit: str, hardware: str) -> None:
        if others := tuple(other for other in self._minding[hardware] if other != unit):
            self._minding[hardware] = others
        else:
            del self._minding[hardware]


def minded(devices: Iterable[Device]) -> frozenset[str]:
    """The hardware that these devices own or depend on."""
    return frozenset[str]().union(*(device.hardware | device.depends for device in devices))
