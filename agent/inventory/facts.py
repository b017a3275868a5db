"""All that an inventory was told of devices, links, health and claims, so that a second one can be told the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct, field

from agent.model import HEALTHY, Health, Held, SlotKey
from backends.base import Device, Link

if TYPE_CHECKING:
    from agent.inventory.inventory import Inventory

_T = TypeVar("_T")


class Facts(Struct, frozen=True):
    """Whatever an inventory is told; none of it changes."""

    units: Mapping[str, Mapping[str, tuple[Device, ...]]] = field(default_factory=dict)
    """Backend → unit → its devices."""
    links: Mapping[str, Mapping[str, Sequence[Link]]] = field(default_factory=dict)
    """The same for links."""
    health: Mapping[str, Health] = field(default_factory=dict)
    """Of hardware that is not healthy."""
    held: Mapping[SlotKey, Held] = field(default_factory=dict)
    """By slot."""

    def teach(self, inventory: Inventory, before: Facts) -> None:
        """Tell an inventory all of this; it knows what was so before."""
        inventory.unclaim(claim for slot, claim in before.held.items() if slot not in self.held)
        inventory.claim(claim for slot, claim in self.held.items() if before.held.get(slot) is not claim)
        names = self.health.keys() | before.health.keys()
        health = {name: self.health.get(name, HEALTHY) for name in names}
        inventory.set_health({name: it for name, it in health.items() if it is not before.health.get(name)})
        for backend, found in self.units.items():
            units = _differing(found, before.units.get(backend, {}))
            links = _differing(self.links.get(backend, {}), before.links.get(backend, {}))
            inventory.update(backend, units, links)


def _differing(now: Mapping[str, Sequence[_T]], before: Mapping[str, Sequence[_T]]) -> dict[str, Sequence[_T]]:
    """What a unit has now, if it is not the same object; nothing of units that are gone."""
    gone = dict.fromkeys(before.keys() - now.keys(), ())
    return {unit: it for unit, it in now.items() if before.get(unit) is not it} | gone
