"""Keeps what is known and what was decided of it: takes devices, health and claims, gives a `Snapshot` of each list that changed.

`ownership.decide` says what follows from all that is known. Here is what makes that cheap: a change has decided again what it
may concern, which are the devices that share hardware, a place or an ID with what changed, directly or through others, and
the claims on these (`Inventory._connected`). All other answers are kept. `decide` of everything gives the same lists at any time.

Every method that takes something in has all lists written when it returns. `take` hands out those that changed since the
last time, which a list knows (`lists.py`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from agent.inventory.lists import Listing, bytes_of
from agent.inventory.lookup import Place, places_of
from agent.inventory.ownership import Holdings, decide, given_to, is_meant_for_one, is_same
from agent.inventory.selection import Candidate, Found, Selection
from agent.model import HEALTHY, Health, Held, Slot, SlotKey, Snapshot, State
from agent.runtime import limits, process
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
        """`resources` are in order, templates included; `before` is what was configured until now (`become`)."""
        self.selection = Selection(resources, backends, before)
        """As the config has it now, and what its templates have given."""
        self._units: defaultdict[str, dict[str, tuple[Found, ...]]] = defaultdict(dict)
        """Backend → unit → its devices."""
        self._links: defaultdict[str, dict[str, Sequence[Link]]] = defaultdict(dict)
        self._index = Index()
        self._pile = process.Pile()
        self._crowded: defaultdict[str, dict[Found, None]] = defaultdict(dict)
        """Resource → the devices that its list had no room for."""
        self._health: dict[str, Health] = {}
        """Of hardware that is not healthy."""
        self._held = Holdings()
        self._foreign = Holdings()
        self._lists: dict[str, Listing] = {name: Listing(name) for name in self.selection.resources}
        self.ready_kinds: set[str] = set()
        """The backends whose devices are known."""
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
        stale, slots = set[Found](), set[SlotKey]()  # the devices and IDs that need a decision
        self.revision += bool(units)
        there = self._units[backend]
        for unit, devices in units.items():
            before = there.get(unit, ())
            if len(before) == len(devices) and all(
                it.device is device for it, device in zip(before, devices, strict=True)
            ):
                continue
            fresh, now = {(device.resource, device.key): device for device in devices}, dict[Any, Found]()
            for found in before:
                key = found.device.resource, found.device.key
                if fresh.get(key) == found.device:
                    now[key] = found
                else:
                    self._remove(found, stale, slots)
            for key, device in fresh.items():
                if key not in now:
                    found = now[key] = Found(backend, unit, device, (), ())
                    self._select(found)
                    self._index.add(found)
                    self._pile.grow(1)
                    stale.add(found)
            if now:
                there[unit] = tuple(now.values())
            else:
                there.pop(unit, None)
        if self._crowded:
            self._make_room(stale)
        self._decide(stale, slots)

    def set_health(self, changes: Mapping[str, Health]) -> None:
        """The health of hardware changed."""
        for hardware, health in changes.items():
            if health.state is State.HEALTHY:
                self._health.pop(hardware, None)
            else:
                self._health[hardware] = health
        self._decide({it for name in changes for it in self._index.minding(name)})

    def claim(self, held: Iterable[Held]) -> bool:
        """Pods hold these now, or with other hardware than was known; returns whether any list may be another then."""
        stale, slots = set[Found](), set[SlotKey]()
        for claim in held:
            if claim.slot in self._foreign.by_slot:
                stale.update(self._index.owners(self._foreign.remove(claim.slot).hardware))
            if claim.foreign:
                self._foreign.add(claim)
                stale.update(self._index.owners(claim.hardware))
                continue
            before = self._held.add(claim)
            if before == claim:
                continue
            if claim.resource not in self.selection.resources:
                slots |= self._bring(claim.resource, claim.backend)
            self._lists[claim.resource].claims[claim.id] = claim
            if before is None and self._changes_no_slot(claim):
                continue
            slots.add(claim.slot)
            if before is not None:
                stale |= self._touched_by(before)
        self._decide(stale, slots)
        return bool(stale or slots)

    def unclaim(self, ended: Iterable[Held]) -> None:
        """These claims have ended."""
        stale, slots = set[Found](), set[SlotKey]()
        for claim in ended:
            if claim.slot in self._foreign.by_slot:
                stale.update(self._index.owners(self._foreign.remove(claim.slot).hardware))
            if claim.slot not in self._held.by_slot:
                continue
            known, listing = self._held.remove(claim.slot), self._lists[claim.resource]
            del listing.claims[claim.id]
            self.revision += claim.id not in listing.owners  # a tombstone goes
            if self._changes_no_slot(known, ends=True):
                continue
            slots.add(claim.slot)
            stale |= self._touched_by(known)
        self._decide(stale, slots)

    def ready(self, backend: str) -> None:
        """The backend has had its first scan, or its time for it is up: its resources may be listed."""
        self.ready_kinds.add(backend)

    def touch(self, resource: str) -> None:
        """Have this list sent again although nothing changed (it makes the kubelet write its checkpoint: A3)."""
        if (listing := self._lists.get(resource)) is not None:
            listing.dirty = True

    # --- another configuration ---

    def told(self) -> tuple[dict[str, Health], dict[SlotKey, Held]]:
        """Copies of what it was told of health and of pods, which a thread may read."""
        return self._health.copy(), self._held.by_slot | self._foreign.by_slot

    def learn(
        self,
        units: Mapping[str, Mapping[str, Sequence[Device]]],
        links: Mapping[str, Mapping[str, Sequence[Link]]],
        health: Mapping[str, Health],
        held: Mapping[SlotKey, Held],
    ) -> None:
        """Take in that this is all that is known; what is the same object as before costs next to nothing.

        Args:
            units: backend → unit → its devices.
            links: the same for links.
            health: of hardware that is not healthy.
            held: what pods hold, by slot.
        """
        sick, known = self.told()
        self.unclaim([claim for slot, claim in known.items() if slot not in held])
        self.claim([claim for slot, claim in held.items() if known.get(slot) is not claim])
        changed = {name for name in health.keys() | sick.keys() if health.get(name) is not sick.get(name)}
        self.set_health({name: health.get(name, HEALTHY) for name in changed})
        for backend, found in units.items():
            gone = dict.fromkeys(self._units[backend].keys() - found.keys(), ())
            unlinked = dict.fromkeys(self._links[backend].keys() - links.get(backend, {}).keys(), ())
            self.update(backend, {**found, **gone}, {**links.get(backend, {}), **unlinked})

    def become(self, other: Inventory, unready: Set[str] = frozenset()) -> None:
        """Take over the whole state of `other`, which must not be used afterwards; only slots that differ count as changed.

        Backends that are `unready` have more to tell before their lists may be sent.
        """
        other.revision, other.names_revision = self.revision + 1, self.names_revision + 1
        other._empty = self._empty
        other.ready_kinds = (self.ready_kinds & set(other.selection.kinds())) - unready
        for name, listing in self._lists.items():
            other._lists.setdefault(name, Listing(name)).go_on_from(listing)
        vars(self).update(vars(other))

    # --- what comes out ---

    def names(self) -> list[str]:
        """The resources to serve: those in force, and those retiring because a pod still holds of them."""
        return [*self.selection.names(), *(name for name in self._lists if name not in self.selection.resources)]

    def take(self, now: float = 0.0) -> list[Snapshot]:
        """The snapshots of the resources that changed since the last call; `now` (monotonic) dates what became of claims."""
        if self.selection.has_templates:
            self._let_empty_go(now)
        snapshots = []
        for name, listing in list(self._lists.items()):
            resource = self.selection.resources.get(name)
            if listing.dirty and (resource is None or resource.spec.backend in self.ready_kinds):
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
            if it.template and it.spec.backend in self.ready_kinds and not self._lists[name].slots
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
        return owner.device if (owner := self._owner(slot)) else None

    def _owner(self, slot: SlotKey) -> Found | None:
        return self._lists[slot[0]].owners.get(slot[1]) if slot[0] in self._lists else None

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
        found = {it for name in hardware for it in self._index.minding(name)}
        return sorted(found, key=lambda it: it.ref)

    def claims(self, resource: str) -> Mapping[str, Held]:
        """What pods hold of a resource, by ID."""
        return self._lists[resource].claims

    def is_held(self, hardware: Iterable[str]) -> bool:
        """Whether a pod holds any of this through a resource of ours."""
        return any(name in self._held.by_hardware for name in hardware)

    def held_elsewhere(self, resource: str) -> Iterator[tuple[str, Held]]:
        """The IDs that no pod gets since one has their hardware through another plugin's resource, each with that claim."""
        for it in self.on(self._foreign.by_hardware):
            if (at := it.placed) is None or at.resource != resource or len(at.ids) > 1:
                continue
            claim = self._foreign.first_of(it.device.hardware)
            if claim is not None and (resource, at.ids[0]) not in self._held.by_slot:
                yield at.ids[0], claim

    def why_not_again(self, slot: SlotKey) -> Health | None:
        """Why an ID that a pod holds, as far as is known here, is not to be given to the next one; None if it may be.

        It stays healthy for that pod. The kubelet learns first that the pod has ended, and another plugin may have given
        the hardware away by then.
        """
        behind = self._behind(slot) if slot in self._held.by_slot else None
        return behind.barred if behind is not None else None

    def is_for_one(self, slot: SlotKey) -> bool:
        """Whether only one pod at a time may have what is behind this ID, as far as the operator has said."""
        behind = self._behind(slot)
        return behind is not None and is_meant_for_one(behind.device, behind.placed)

    def _behind(self, slot: SlotKey) -> Found | None:
        """The device that has an ID; else that which the pod was given that holds it."""
        if (owner := self._owner(slot)) is not None or (claim := self._held.by_slot.get(slot)) is None:
            return owner
        return next((it for it in given_to(claim, self._index.at) if is_same(claim, it.device)), None)

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

    def places(self) -> Iterator[Place]:
        """Where hardware can be found by name: what is there, and what is gone and a pod still holds."""
        tombstones = (it for it in self._held.by_slot.values() if it.id not in self._lists[it.resource].owners)
        return places_of(self._all(), tombstones)

    def unclaimed(self) -> list[Found]:
        """The devices that no resource has; `why` has the reasons."""
        return sorted((found for found in self._all() if found.placed is None), key=lambda found: found.ref)

    def placed_in(self, resource: str) -> tuple[Found, ...]:
        """The devices that one resource has: the same object while these are the same, with the same IDs."""
        return self._lists[resource].devices if resource in self._lists else ()

    def without_place(self) -> list[tuple[Found, str]]:
        """The devices that no resource has, each with the one that had no room for it, if one would have it."""
        full = {found: name for name, crowded in self._crowded.items() for found in crowded}
        return [(found, full.get(found, "")) for found in self._all() if found.placed is None]

    def _all(self) -> Iterator[Found]:
        return (found for units in self._units.values() for of_unit in units.values() for found in of_unit)

    # --- devices come and go ---

    def _select(self, found: Found) -> None:
        """Ask who takes a device: a list that is full takes only one that a pod holds. Other IDs are not even made."""
        full = {} if self._index.full and self.is_held(found.device.hardware) else self._index.full
        found.candidates, found.refused, without_room = self.selection.select(found.backend, found.device, full)
        for resource in without_room:
            self._crowded[resource][found] = None

    def _make_room(self, stale: set[Found]) -> None:
        """Ask again about the devices that found no room, where there is some; adds to `stale` what needs a decision."""
        for resource, crowded in self._crowded.items():
            while crowded and resource not in self._index.full:
                found = next(iter(crowded))
                del crowded[found]
                stale |= {found, *self._index.remove(found)}
                self._select(found)
                self._index.add(found)

    def _remove(self, found: Found, stale: set[Found], slots: set[SlotKey]) -> None:
        """Forget a device; adds to `stale` those that may now have what it had, and to `slots` what pods have of it."""
        self._pile.grow(-1)
        for crowded in self._crowded.values():
            crowded.pop(found, None)
        slots |= self._claims_on(found)
        stale |= self._index.remove(found)
        stale.discard(found)
        if found.placed is not None:
            self._withdraw(found, found.placed, slots)

    def _withdraw(self, found: Found, place: Candidate, slots: set[SlotKey]) -> None:
        """Take a device out of the list it is in; its IDs, of which `slots` gets all, have no device then."""
        found.placed = None
        self._lists[place.resource].leave(found, place.ids)
        slots.update((place.resource, device_id) for device_id in place.ids)

    # --- who gets what ---

    def _decide(self, stale: Collection[Found], slots: Collection[SlotKey] = ()) -> None:
        """Decide about these devices and IDs and all that is connected with them, and write what differs into the lists."""
        if not (stale or slots):
            return
        found, held, alone = self._connected(stale, slots)
        decision = decide(self.selection, found, self._health, held, self._foreign)
        loose, again = set(slots), set[SlotKey]()
        differ = (it for it in found if decision.placed.get(it) is not it.placed)
        changed = sorted(differ, key=lambda it: it.ref)  # `found` is a set: in this order a list has its devices
        self.revision += bool(changed)
        for it in changed:
            if it.placed is not None:
                self._withdraw(it, it.placed, loose)
        for it in changed:
            if (place := decision.placed.get(it)) is not None:
                it.placed = place
                if place.value or place.resource not in self._lists:
                    again |= self._bring(place.resource, it.backend, place.value)
                self._lists[place.resource].join(it, place.ids)
        for name, of_list in decision.lists.items():
            self._lists[name].write(of_list)
        for name, device_id in loose:
            if name in self._lists and device_id not in decision.lists.get(name, ()):
                self._lists[name].drop(device_id)
        for it in found:
            it.lost, it.barred = decision.rejected.get(it, ()), decision.barred.get(it)
            it.is_plain = None if it in alone and it.placed is not None and it.barred is None else False
        self._decide((), again)

    def _connected(self, stale: Iterable[Found], slots: Iterable[SlotKey]) -> tuple[set[Found], Holdings, set[Found]]:
        """What has to be decided together: these and whatever shares hardware, places or IDs with them, also through others.

        Returns the devices, the claims, and those of the devices that share neither hardware nor IDs with others.
        """
        found, alone, claims = set[Found](), set[Found](), dict[SlotKey, Held]()
        devices, waiting = list(stale), list(slots)
        names = set[str]()  # whose devices have been looked up
        while devices or waiting:
            if waiting:
                slot = waiting.pop()
                if slot not in claims and (claim := self._held.by_slot.get(slot)) is not None:
                    claims[slot] = claim
                    is_new = not (claim.hardware and claim.hardware <= names and claim.place <= names)
                    if is_new or not found.issuperset(self._index.wanted[slot[0]].get(slot[1], ())):
                        devices += self._touched_by(claim) - found
                        names |= claim.hardware | claim.place
                continue
            it = devices.pop()
            if it in found:
                continue
            found.add(it)
            rivals, neighbours = self._index.sharing(it)
            if not rivals:
                alone.add(it)
            devices += rivals
            devices += neighbours
            if self._health:  # while a pod holds this hardware, others that depend on it are otherwise, too
                for name in it.device.hardware | it.device.depends:
                    if name in self._health and self._health[name].while_held:
                        devices += self._index.minding(name)
                        waiting += self._held.by_hardware.get(name, ())
            names |= it.device.hardware | it.device.place
            if self._held.by_slot:
                waiting += self._claims_on(it)
        held = self._held if len(claims) == len(self._held.by_slot) else Holdings(claims.values())
        return found, held, alone

    def _touched_by(self, claim: Held) -> set[Found]:
        """The devices for which a claim may matter."""
        found = {it for name in claim.hardware | claim.place for it in self._index.at.get(name, ())}
        found.update(self._index.wanted[claim.resource].get(claim.id, ()))
        for name in claim.hardware if self._health else ():
            if name in self._health and self._health[name].while_held:
                found.update(self._index.minding(name))
        if not claim.hardware and self.selection.is_strict(claim.resource):
            found.update(it for wanting in self._index.wanted[claim.resource].values() for it in wanting)
        return found

    def _claims_on(self, found: Found) -> set[SlotKey]:
        """The claims that may matter for a device: what `_touched_by` finds, seen from the device."""
        by_hardware, by_place = self._held.by_hardware, self._held.by_place
        names = found.device.hardware | found.device.place
        slots = {slot for name in names for index in (by_hardware, by_place) for slot in index.get(name, ())}
        for candidate in found.candidates:
            name = candidate.resource
            if (listing := self._lists.get(name)) is not None and listing.claims:
                slots.update((name, device_id) for device_id in listing.claims.keys() & set(candidate.ids))
                if self.selection.is_strict(name):
                    slots.update((name, claim.id) for claim in listing.claims.values() if not claim.hardware)
        return slots

    def _changes_no_slot(self, claim: Held, *, ends: bool = False) -> bool:
        """Whether a decision that counts this claim gives the same slots as the last: an Allocate of a thousand tokens saves it.

        So it is where the claim is of the device that has its ID, and no other device has any of that hardware.
        """
        is_barred = claim.claim is not None and self.selection.is_by_plugin(claim.resource)
        if (owner := self._owner(claim.slot)) is None or owner.lost or claim.trouble or is_barred:
            return False
        if owner.is_plain is None and owner.placed is not None:
            slots = self._lists[claim.resource].slots
            owner.is_plain = all(slots[device_id].health is HEALTHY for device_id in owner.placed.ids)
        if not owner.is_plain:
            return False
        device = owner.device
        if not (is_same(claim, device) and claim.hardware <= device.hardware and claim.place <= device.place):
            return False
        if any(len(self._index.at[name]) > 1 for name in device.place):  # whether its neighbour knows that it is held
            first = self._held.first_of(claim.hardware)
            is_another_token = first is not None and first == replace(claim, id=first.id) and first.slot < claim.slot
            return is_another_token and not ends
        return not ends or (len(owner.candidates) == 1 and self._health.keys().isdisjoint(device.hardware))

    def _bring(self, resource: str, backend: str, value: str = "") -> set[SlotKey]:
        """Have a list of a resource that a template gives or that has retired; returns the claims that this may touch."""
        is_new = self.selection.bring(resource, backend, value)
        if is_new or resource not in self._lists:
            self.names_revision += 1
            self._lists.setdefault(resource, Listing(resource))
        return {claim.slot for claim in self._lists[resource].claims.values()} if is_new else set()


_Index = dict[str, tuple[Found, ...]]


class Index(Struct, frozen=True):
    """Where a piece of hardware, a place or an ID leads."""

    at: _Index = field(default_factory=dict)
    """Hardware, or a place → who owns it or is there."""
    below: _Index = field(default_factory=dict)
    """Hardware → who depends on it."""
    wanted: defaultdict[str, _Index] = field(default_factory=lambda: defaultdict(dict))
    """Resource → ID → whose it would be."""
    contested: set[str] = field(default_factory=set)
    """Resources of which two devices have had the same ID."""
    sizes: Counter[str] = field(default_factory=Counter)
    """Resource → the bytes of a list with all that it would have."""
    full: dict[str, str] = field(default_factory=dict)
    """Resources whose lists would be longer than can be sent, each with why it takes no more devices."""

    def owners(self, hardware: Iterable[str]) -> list[Found]:
        """The devices that own any of this, in the order of their refs."""
        owners = {it for name in hardware for it in self.at.get(name, ()) if name in it.device.hardware}
        return sorted(owners, key=lambda it: it.ref) if len(owners) > 1 else list(owners)

    def minding(self, name: str) -> Iterator[Found]:
        """The devices that own this hardware, or depend on it."""
        yield from (it for it in self.at.get(name, ()) if name in it.device.hardware)
        yield from self.below.get(name, ())

    def sharing(self, found: Found) -> tuple[set[Found], set[Found]]:
        """The other devices that share hardware or an ID with this one, and those that share a place."""
        rivals, neighbours = set[Found](), set[Found]()
        for name in found.device.hardware | found.device.place:
            if len(filed := self.at[name]) > 1:
                (rivals if name in found.device.hardware else neighbours).update(filed)
        for candidate in found.candidates:
            if candidate.resource in self.contested:
                for filed in map(self.wanted[candidate.resource].__getitem__, candidate.ids):
                    rivals.update(filed)
        return rivals - {found}, neighbours - {found}

    def add(self, found: Found) -> None:
        """File a device."""
        for candidate in found.candidates:
            resource = candidate.resource
            self.sizes[resource] += bytes_of(candidate.ids, found.device.numa_node)
            if (size := self.sizes[resource]) > limits.MESSAGE_LIMIT and resource not in self.full:
                fit = (len(self.wanted[resource]) + len(candidate.ids)) * limits.MESSAGE_LIMIT // size
                self.full[resource] = f"its list is full: {fit:,} such IDs fit in the 4 MiB that a kubelet receives"
        alone = (found,)
        for index, keys in self._places(found):
            if index.keys().isdisjoint(keys):
                index.update(dict.fromkeys(keys, alone))
            else:
                index.update({key: (*index.get(key, ()), found) for key in keys})
                self.contested.update(it.resource for it in found.candidates if index is self.wanted[it.resource])

    def remove(self, found: Found) -> set[Found]:
        """Take a device out; those that were filed beside it."""
        for candidate in found.candidates:
            self.sizes[candidate.resource] -= bytes_of(candidate.ids, found.device.numa_node)
            if self.sizes[candidate.resource] <= limits.MESSAGE_LIMIT:
                self.full.pop(candidate.resource, None)
        rivals, neighbours = self.sharing(found)
        for index, keys in self._places(found):
            for key in keys:
                filed = index.pop(key)
                if len(filed) > 1:
                    index[key] = tuple(it for it in filed if it is not found)
        return rivals | neighbours

    def _places(self, found: Found) -> Iterator[tuple[_Index, Collection[str]]]:
        """Every index, and the keys under which this device is filed there."""
        yield self.at, found.device.hardware | found.device.place
        yield self.below, found.device.depends - found.device.hardware
        for candidate in found.candidates:
            yield self.wanted[candidate.resource], candidate.ids
