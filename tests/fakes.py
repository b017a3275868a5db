"""A backend that says what a test tells it, and devices made in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec

from agent.inventory.inventory import Inventory
from agent.model import Held
from backends.base import (
    All,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    Host,
    Record,
    Resource,
    ResourceSpec,
    Signal,
    Watches,
)
from backends.interface.values import Known

KIND = "fake"


def inventory(*resources: Resource[Any], devices: Iterable[Device] = ()) -> Inventory:
    """One that is ready, with these devices."""
    made = Inventory(resources, {KIND: Fake(*resources)})
    made.update(KIND, by_unit(devices))
    made.ready(KIND)
    return made


def shown(it: Inventory, name: str) -> dict[str, str]:
    """A resource's slots, with the reason or the state of each."""
    return {slot.id: slot.health.reason or slot.health.state.value for slot in it.slots(name).values()}


class FakeOptions(msgspec.Struct, frozen=True):
    """None."""


def resource(name: str, kind: str = KIND, replicas: int = 1) -> Resource[Any]:
    """A resource that selects the devices made `taken_by` it."""
    return Resource(name, ResourceSpec(kind, FakeOptions(), select=({"taken_by": (name,)},), replicas=replicas))


def device(
    key: str,
    *taken_by: str,
    hardware: Iterable[str] | None = None,
    ids: Iterable[str] | None = None,
    unit: str = "",
    identity: str = "",
    depends: Iterable[str] = (),
    exclusive: Iterable[str] = (),
    numa_node: int | None = None,
    unusable: str = "",
    ancestry: Sequence[str] = (),
) -> Device:
    """A device that owns the hardware of its own name, unless told otherwise."""
    return Device(
        key,
        unit or key,
        frozenset((key,) if hardware is None else hardware),
        depends=frozenset(depends),
        identity=identity,
        exclusive=frozenset(exclusive),
        numa_node=numa_node,
        unusable=unusable,
        ancestry=tuple(ancestry),
        attributes={"taken_by": taken_by, "ids": (key,) if ids is None else tuple(ids)},
    )


def held(resource: str, device_id: str, found: Device | None = None) -> Held:
    """What an Allocate of this ID records; without a device, what only the kubelet remembers."""
    if found is None:
        return Held(resource, device_id, KIND)
    return Held.of(resource, device_id, KIND, found)


def reconfigure(
    it: Inventory,
    resources: Sequence[Resource[Any]],
    backends: Mapping[str, Backend[Any]],
    units: Mapping[str, Mapping[str, tuple[Device, ...]]] = MappingProxyType({}),
) -> None:
    """As a reload does it; `units` are those that new instances of backends see otherwise than before."""
    seen: dict[str, dict[str, tuple[Device, ...]]] = {}
    for kind, of_kind in it._units.items():
        seen[kind] = {unit: tuple(found.device for found in of_unit) for unit, of_unit in of_kind.items()}
    for kind, found in units.items():
        seen.setdefault(kind, {}).update(found)
    after = Inventory(resources, backends, it.selection)
    after.learn(seen, {}, *it.told())
    it.become(after)


class Fake(Backend[FakeOptions]):
    """Shows what is in `hardware`; a value that can be called is called for the answer."""

    options_type: ClassVar = FakeOptions

    def __init__(self, *resources: Resource[Any]) -> None:
        super().__init__(Host(), resources)
        self.hardware: dict[str, Sequence[Device] | Callable[[], Any]] = {}
        self.listed: Callable[[], Any] = lambda: list(self.hardware)
        self.affected: Callable[[Hint], Any] = lambda _hint: All.ALL
        self.watched: Callable[[], Any] = Watches
        self.seen: Callable[[Device], Any] = lambda _device: ()
        self.recorded: Callable[[Record], Any] = lambda _record: ()
        self.looked: list[str] = []
        self.probed: list[str] = []

    def units(self) -> Iterable[str]:
        found: Iterable[str] = self.listed()
        return found

    def discover(self, unit: str) -> Discovery:
        self.looked.append(unit)
        answer = self.hardware.get(unit, ())
        if callable(answer):
            told: Discovery = answer()
            return told
        return Discovery(tuple(answer))

    def edits(self, resource: Resource[FakeOptions], grants: Sequence[Grant]) -> ContainerEdits:
        return ContainerEdits()

    def ids(self, resource: Resource[FakeOptions], device: Device) -> Sequence[str]:
        return device.attributes["ids"]

    def probe(self, device: Device) -> Iterable[Signal]:
        self.probed.append(device.key)
        signals: Iterable[Signal] = self.seen(device)
        return signals

    def signals(self, record: Record) -> Iterable[Signal]:
        signals: Iterable[Signal] = self.recorded(record)
        return signals

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        units: Iterable[str] | All = self.affected(hint)
        return units

    def watches(self, known: Known) -> Watches:
        wanted: Watches = self.watched()
        return wanted


def by_unit(devices: Iterable[Device]) -> Mapping[str, tuple[Device, ...]]:
    """As discovery hands them on."""
    units: dict[str, tuple[Device, ...]] = {}
    for found in devices:
        units[found.unit] = (*units.get(found.unit, ()), found)
    return units


class Sharing(Fake):
    """Has IDs of its own for a resource with replicas."""

    def ids(self, resource: Resource[FakeOptions], device: Device) -> Sequence[str]:
        ids = super().ids(resource, device)
        return ids if resource.spec.replicas == 1 else tuple(f"{i}::{n}" for i in ids for n in range(2))
