"""Owns the lists: takes devices, health and claims, and gives one `Snapshot` for each resource that changed.

Pure and incremental: a change touches the slots it concerns, not the list they are in. Every method that
takes something in marks what it altered; `take` hands out the snapshots of altered resources.

Rules (design, "inventory"): a device joins the first resource that selects it, if none of its hardware
belongs to another resource; claims beat match order; an ID that is claimed but has no device stays as an
Unhealthy tombstone (kubelet contract: A7); another card at the same key is other hardware.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from agent.inventory.competition import assign
from agent.inventory.facts import Facts
from agent.inventory.found_devices import Found, Indexes
from agent.inventory.lookup import Place, find, places_of
from agent.inventory.selection import Selection
from agent.inventory.slot_writer import SlotWriter
from agent.inventory.slots import Listing
from agent.inventory.tombstones import Holdings, is_same
from agent.model import Health, Held, Slot, SlotKey, Snapshot, State
from agent.runtime import garbage
from backends.base import Backend, Device, Link, Resource

KEPT: Final = 86400.0
"""Seconds for which a name that a template gave is served without a device and without a claim: as long as its hardware is said
to be missing. The kubelet goes on with a capacity of 0 afterwards, as before (kubelet contract: A3, A2)."""

MOST_EMPTY: Final = 64
"""Such names at a time, those that were used last: each is a socket, and as many may come as there are sticks with serials."""


class Inventory:
    """The lists of all resources, and who owns which hardware."""

    def __init__(
        self,
        resources: Sequence[Resource[Any]],
        backends: Mapping[str, Backend[Any]],
        before: Selection | None = None,
    ) -> None:
        """`resources` are in order, templates included; `before` is what was configured until now (`go_on_from`)."""
        self.selection = Selection(resources, backends, before)
        """As the config has it now, and what its templates have given."""
        self._units: defaultdict[str, dict[str, tuple[Found, ...]]] = defaultdict(dict)
        """Backend → unit → its devices."""
        self._links: defaultdict[str, dict[str, Sequence[Link]]] = defaultdict(dict)
        self._index = Indexes()
        self._pile = garbage.Pile()
        self._crowded: defaultdict[str, dict[Found, None]] = defaultdict(dict)
        """Resource → the devices that its list had no room for."""
        self._health: dict[str, Health] = {}
        """Of hardware that is not healthy."""
        self._held = Holdings()
        self._foreign = Holdings()
        self._lists: dict[str, Listing] = {name: Listing(name) for name in self.selection.resources}
        known = self.selection, self._index, self._health, self._held, self._foreign
        self._slots = SlotWriter(*known, self._lists)
        self._ready: set[str] = set()
        self.revision = 0
        """Raised whenever other devices are there, or have other places, or other resources."""
        self.names_revision = 0
        """Raised whenever `names` may be others."""
        self._empty: dict[str, float] = {}
        """Name that a template gave → since when (monotonic seconds) it has had neither a device nor a claim."""

    # --- what goes in ---

    def update(
        self,
        backend: str,
        units: Mapping[str, Sequence[Device]],
        links: Mapping[str, Sequence[Link]] = MappingProxyType({}),
    ) -> None:
        """These units of a backend hold exactly these devices now, and units of `links` exactly these links."""
        known = self._links[backend]
        known.update(links)
        for unit in [unit for unit, found in links.items() if not found]:
            del known[unit]
        moved: set[Found] = set()
        self.revision += bool(units)
        for unit, devices in units.items():
            self._replace_unit(backend, unit, devices, moved)
        if self._crowded:
            self._make_room(moved)
        if moved:
            self._settle(moved)
        self._slots.write_touched()
        if self._slots.strict:
            self._slots.withhold()

    def set_health(self, changes: Mapping[str, Health]) -> None:
        """The health of hardware changed."""
        for hardware, health in changes.items():
            if health.state is State.HEALTHY:
                self._health.pop(hardware, None)
            else:
                self._health[hardware] = health
        self._slots.write_minding(changes)

    def claim(self, held: Iterable[Held]) -> bool:
        """Pods hold these from now on, or hold them with other hardware than was known; may any list be another then?"""
        moved: set[Found] = set()
        changed: list[Held] = []
        foreign: set[str] = set()  # hardware
        for claim in held:
            if claim.slot in self._foreign.by_slot:
                foreign |= self._foreign.remove(claim.slot).hardware
            if claim.foreign:
                self._foreign.add(claim)
                foreign |= claim.hardware
                continue
            before = self._held.add(claim)
            if before == claim:
                continue
            if before is not None:
                changed.append(before)
                moved |= self._concerned(before)
            if claim.resource not in self.selection.resources:
                self._bring(claim.resource, claim.backend)
            self._lists[claim.resource].claims[claim.id] = claim
            if (home := self._home(claim)) is None:
                moved |= self._concerned(claim)
            elif before is None and not self._slots.minds_claim(home, claim):
                continue
            changed.append(claim)
        if changed or foreign:
            self._claims_changed(changed, moved, foreign)
        return bool(changed or foreign)

    def unclaim(self, ended: Iterable[Held]) -> None:
        """These claims have ended."""
        moved: set[Found] = set()
        changed: list[Held] = []
        foreign: set[str] = set()
        for claim in ended:
            if claim.slot in self._foreign.by_slot:
                foreign |= self._foreign.remove(claim.slot).hardware
            if claim.slot not in self._held.by_slot:
                continue
            known = self._held.remove(claim.slot)
            changed.append(known)
            self.revision += claim.id not in self._lists[claim.resource].owners  # a tombstone goes
            del self._lists[claim.resource].claims[claim.id]
            moved |= self._concerned(known)
        self._claims_changed(changed, moved, foreign)

    def _claims_changed(self, changed: Sequence[Held], moved: set[Found], foreign: set[str]) -> None:
        """Write the slots of these claims, settle `moved`, write what depends on `foreign` hardware or on being held."""
        self._slots.write_all(claim.slot for claim in changed)
        self._slots.touch_claims(changed)
        if moved:
            self._settle(moved)
        held = {hardware for claim in changed for hardware in claim.hardware if hardware in self._health}
        self._slots.write_minding(foreign.union(name for name in held if self._health[name].while_held))
        self._slots.write_touched()
        if self._slots.strict:
            self._slots.withhold()

    def ready(self, backend: str) -> None:
        """The backend has had its first scan, or its time for it is up: its resources may be listed."""
        if backend not in self._ready:
            self._ready.add(backend)
            for name, listing in self._lists.items():
                if self.selection.kind(name) == backend:
                    listing.dirty = True

    def touch(self, resource: str) -> None:
        """Have this list sent again although nothing changed (it makes the kubelet write its checkpoint: A3)."""
        if (listing := self._lists.get(resource)) is not None:
            listing.dirty = True

    # --- another configuration ---

    def facts(self) -> Facts:
        """What it was told of pods and of health, as it is now."""
        return Facts(health=self._health.copy(), held=self._held.by_slot | self._foreign.by_slot)

    def go_on_from(self, before: Inventory) -> None:
        """Continue the lists of `before`, so that only slots that differ count as changed; `before` is not altered."""
        self.revision, self.names_revision = before.revision + 1, before.names_revision + 1
        self.selection.go_on_from(before.selection)
        self._empty = before._empty
        self._ready = before._ready & {resource.spec.backend for resource in self.selection.written.values()}
        for name, listing in before._lists.items():
            self._lists.setdefault(name, Listing(name)).go_on_from(listing)

    def become(self, other: Inventory) -> None:
        """Take over the whole state of `other`, in one step that cannot fail; `other` must not be used afterwards."""
        vars(self).update(vars(other))

    # --- what comes out ---

    def names(self) -> list[str]:
        """The resources to serve: those in force, and those retiring because a pod still holds of them."""
        return [*self.selection.names(), *(name for name in self._lists if name not in self.selection.resources)]

    def take(self, now: float = 0.0) -> list[Snapshot]:
        """The snapshots of the resources that changed since the last call; `now` (monotonic) dates what became of claims."""
        self._let_empty_go(now)
        snapshots = []
        for name, listing in list(self._lists.items()):
            resource = self.selection.resources.get(name)
            if listing.dirty and (resource is None or resource.spec.backend in self._ready):
                snapshots.append(listing.snapshot(now, self._index.sizes[name]))
            if resource is None and not listing.slots:
                del self._lists[name]  # retired: its last claim has ended
                self.names_revision += 1
        return snapshots

    def _let_empty_go(self, now: float) -> None:
        """Let the names of templates go that nothing has needed for long, and the longest unused where there are many."""
        self._empty = {
            name: self._empty.get(name, now)
            for name, it in self.selection.resources.items()
            if it.template and it.spec.backend in self._ready and not self._lists[name].slots
        }
        oldest = sorted(self._empty, key=self._empty.__getitem__)
        for n, name in enumerate(oldest):
            if n < len(oldest) - MOST_EMPTY or now - self._empty[name] >= KEPT:
                self.selection.let_go(name)

    def slot(self, resource: str, device_id: str) -> Slot | None:
        """One slot as it is now."""
        listing = self._lists.get(resource)
        return listing.slots.get(device_id) if listing else None

    def device(self, slot: SlotKey) -> Device | None:
        """The device that has a slot's ID now; not one that a pod holds under an ID that it does not have."""
        found = self._lists[slot[0]].owners.get(slot[1]) if slot[0] in self._lists else None
        return found.device if found else None

    def slots(self, resource: str) -> Mapping[str, Slot]:
        """All slots of a resource as they are now."""
        return self._lists[resource].slots

    def all_slots(self) -> dict[str, dict[str, Slot]]:
        """Copies of the slots of all resources, which a thread may read."""
        return {name: dict(self.slots(name)) for name in self.names()}

    def devices(self, backend: str) -> list[Device]:
        """All devices of a backend, with and without a resource."""
        found = (it for of_unit in self._units[backend].values() for it in of_unit)
        return [it.device for it in sorted(found, key=lambda it: it.ref)]

    def on(self, hardware: Iterable[str], *, minding: bool = False) -> list[Found]:
        """The devices that own any of this hardware; those that depend on it too, if `minding`."""
        if not minding:
            return self._index.owners(hardware)
        found = {it for name in hardware for it in self._index.minded.get(name, ())}
        return sorted(found, key=lambda it: it.ref)

    def claims(self, resource: str) -> Mapping[str, Held]:
        """What pods hold of a resource, by ID."""
        return self._lists[resource].claims

    def is_held(self, hardware: Iterable[str]) -> bool:
        """Does a pod hold any of this through a resource of ours?"""
        return any(name in self._held.by_hardware for name in hardware)

    def held_elsewhere(self, resource: str) -> Iterator[tuple[str, Held]]:
        """The IDs that no pod gets since one has their hardware through another plugin's resource, each with that claim."""
        for found in self.on(self._foreign.by_hardware):
            if found.placed and found.placed.resource == resource and (claim := self._slots.held_elsewhere(found)):
                yield found.placed.ids[0], claim

    def why_not_again(self, slot: SlotKey) -> Health | None:
        """Why an ID that a pod holds, as far as is known here, is not to be given to the next one; None if it may be."""
        return self._slots.why_not_again(slot)

    def is_for_one(self, slot: SlotKey) -> bool:
        """May only one pod at a time have what is behind this ID, as far as the operator has said?"""
        return slot[0] in self._lists and self._slots.is_for_one(slot)

    def links(self, backend: str) -> list[Link]:
        """All links between devices of a backend."""
        return [link for links in self._links[backend].values() for link in links]

    def omitted(self, resource: str) -> int:
        """How many unclaimed slots the last snapshot left out, to pass the kubelet's message limit."""
        listing = self._lists.get(resource)
        return listing.omitted if listing else 0

    def resource(self, name: str) -> Resource[Any] | None:
        """The resource of that name that is in force; None while it retires."""
        return self.selection.resources.get(name)

    def kind(self, name: str) -> str | None:
        """The backend whose resource this is, or was, or would be; None: it is not ours."""
        claims = self._lists[name].claims.values() if name in self._lists else ()
        holding = next((claim.backend for claim in claims), None)
        return self.selection.kind(name) or holding or self.selection.kind_to_be(name)

    def find(self, name: str, *others: Iterable[Place]) -> frozenset[str]:
        """The hardware that a person calls so: a device's key, an ID, the hardware's own name.

        `others` are looked at where nothing that is there has the name.

        Raises:
            FairleadError: nothing is called that, or several devices are.
        """
        tombstones = (it for it in self._held.by_slot.values() if it.id not in self._lists[it.resource].owners)
        return find(name, places_of(self._all(), tombstones), *others)

    def unclaimed(self) -> list[Found]:
        """The devices that no resource has; `why` has the reasons."""
        return sorted((found for found in self._all() if found.placed is None), key=lambda found: found.ref)

    def placed(self) -> list[Found]:
        """The devices that a resource has."""
        return [found for found in self._all() if found.placed is not None]

    def without_place(self) -> list[tuple[Found, str]]:
        """The devices that no resource has, each with the one that had no room for it, if one would have it."""
        full = {found: name for name, crowded in self._crowded.items() for found in crowded}
        return [(found, full.get(found, "")) for found in self._all() if found.placed is None]

    def _all(self) -> Iterator[Found]:
        return (found for units in self._units.values() for of_unit in units.values() for found in of_unit)

    # --- devices come and go ---

    def _replace_unit(self, backend: str, unit: str, devices: Sequence[Device], moved: set[Found]) -> None:
        """Swap a unit's devices; adds to `moved` the devices that need a decision."""
        fresh = {(device.resource, device.key): device for device in devices}
        units, there = self._units[backend], {}
        for found in units.get(unit, ()):
            key = found.device.resource, found.device.key
            if fresh.get(key) == found.device:
                there[key] = found
            else:
                self._remove(found, moved)
        for key, device in fresh.items():
            if key not in there:
                found = there[key] = Found(backend, unit, device, (), ())
                self._select(found)
                self._index.add(found)
                self._pile.grow(1)
                self._slots.touch(found)
                if device.unusable:
                    self._slots.rewrite_tombstones(device)
                moved.add(found)
        if there:
            units[unit] = tuple(there.values())
        else:
            units.pop(unit, None)

    def _select(self, found: Found) -> None:
        """Ask who takes a device: a list that is full takes only one that a pod holds. Other IDs are not even made."""
        full = {} if self._index.full and self.is_held(found.device.hardware) else self._index.full
        found.candidates, found.refused, without_room = self.selection.select(found.backend, found.device, full)
        for resource in without_room:
            self._crowded[resource][found] = None

    def _make_room(self, moved: set[Found]) -> None:
        """Ask again about the devices that found no room, where there is some; adds to `moved` as `_replace_unit`."""
        for resource, crowded in self._crowded.items():
            while crowded and resource not in self._index.full:
                found = next(iter(crowded))
                del crowded[found]
                moved |= {found, *self._index.remove(found)}
                self._select(found)
                self._index.add(found)

    def _remove(self, found: Found, moved: set[Found]) -> None:
        """Forget a device; adds to `moved` those that may now have what it had."""
        self._pile.grow(-1)
        self._slots.touch(found)
        for crowded in self._crowded.values():
            crowded.pop(found, None)
        moved |= self._index.remove(found)
        moved.discard(found)
        if (place := found.placed) is not None:
            claims = self._lists[place.resource].claims
            given = (claims[device_id].hardware for device_id in claims and claims.keys() & set(place.ids))
            moved.update(self._index.owners(frozenset[str]().union(*given)))  # kept back once the IDs have no device
            self._slots.withdraw(found, place)
        if found.device.unusable:
            self._slots.rewrite_tombstones(found.device)

    # --- who gets what ---

    def _concerned(self, claim: Held) -> set[Found]:
        return {*self._index.wanted[claim.resource].get(claim.id, ()), *self._index.owners(claim.hardware)}

    def _settle(self, moved: set[Found]) -> None:
        """Find a place for these devices and for all that compete with them."""
        rivals = {it.ref: it for it in sorted(self._index.connected(moved, self._held.by_slot), key=lambda it: it.ref)}
        outcome = assign(
            {ref: (found.device, found.candidates) for ref, found in rivals.items()},
            self._held.by_slot,
            self._held.by_hardware,
            self.selection.stands_for,
        )
        for ref, placed in outcome.placed.items():
            if placed.value:
                self._bring(placed.resource, rivals[ref].backend, placed.value)
        changed = [found for ref, found in rivals.items() if outcome.placed.get(ref) != found.placed]
        self.revision += bool(changed)
        for found in changed:
            if found.placed is not None:
                self._slots.touch(found)
                self._slots.withdraw(found, found.placed)
        for found in changed:
            found.placed = outcome.placed.get(found.ref)
            if found.placed is not None:
                self._lists[found.placed.resource].owners.update(dict.fromkeys(found.placed.ids, found))
                self._slots.write_device(found)
                self._slots.touch(found)
        for ref, found in rivals.items():
            found.lost = outcome.rejected.get(ref, ())
            if self._slots.minds_claims(found):
                self._slots.write_device(found)

    def _bring(self, resource: str, backend: str, value: str = "") -> None:
        """Have a list for this resource, which a template gives, or which is configured no more and pods hold of."""
        if self.selection.bring(resource, backend, value) or resource not in self._lists:
            self.names_revision += 1
            self._lists.setdefault(resource, Listing(resource))

    def _home(self, claim: Held) -> Found | None:
        """The device that a claim is about, where it has the claim's ID and all that the pod has, and no other wants that ID.

        Every Allocate asks, and nothing is to be decided then.
        """
        found = self._lists[claim.resource].owners.get(claim.id)
        if found is None or len(self._index.wanted[claim.resource][claim.id]) > 1:
            return None
        has_all = claim.hardware <= found.device.hardware and is_same(claim, found.device)
        return found if has_all else None
