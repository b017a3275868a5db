"""Writes the slots of the lists: what the kubelet is told of each device, and of each claim whose ID no device has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agent.inventory.competition import Candidate
from agent.inventory.conditions import condition
from agent.inventory.found_devices import Found, Indexes
from agent.inventory.selection import Selection
from agent.inventory.slots import Listing
from agent.inventory.tombstones import (
    CROWDED,
    GONE,
    TROUBLES,
    UNMAPPED,
    Holdings,
    beside,
    elsewhere,
    is_same,
    kept_back,
    owns_its_place,
    places,
    replaced,
    retired,
    unusable,
    withheld,
)
from agent.model import HEALTHY, Health, Held, Slot, SlotKey, State
from backends.base import Device


class SlotWriter:
    """Reads what an inventory knows, and writes its lists.

    `health` is that of hardware which is not healthy; pods have `held` through resources of ours, `foreign` through others.
    """

    def __init__(
        self,
        selection: Selection,
        index: Indexes,
        health: Mapping[str, Health],
        held: Holdings,
        foreign: Holdings,
        lists: Mapping[str, Listing],
    ) -> None:
        self._selection, self._index, self._health = selection, index, health
        self._held, self._foreign, self._lists = held, foreign, lists
        self._touched: set[str] = set()  # places where a device, or what a pod holds, is another than before
        self.strict = {name for name, it in selection.written.items() if it.spec.adopt == "strict"}

    def withdraw(self, found: Found, place: Candidate) -> None:
        """Take a device's slots from the list it is in; the claimed ones become tombstones."""
        found.placed = None
        listing = self._lists[place.resource]
        former = self._former(found, listing) if listing.keeps_back else ()
        for device_id in place.ids:
            del listing.owners[device_id]
        listing.drop([device_id for device_id in place.ids if device_id not in listing.claims])
        listing.keep_back(found, place.ids, (), crowded=False)
        for device_id in listing.claims and listing.claims.keys() & set(place.ids):
            self._write_slot((place.resource, device_id))
        for slot in former:
            if slot[0] == place.resource:
                self._write_slot(slot)

    def write_device(self, found: Found) -> None:
        """Write all slots of a placed device; they change together."""
        if (place := found.placed) is None:
            return
        device, health, listing = found.device, self._health_of(found), self._lists[place.resource]
        taken, minds_claims = self._taken(found), self.minds_claims(found)
        if not (listing.claims or taken or minds_claims):
            listing.put_device(place.ids, device, health)
            return
        held = [claim for i in place.ids if (claim := listing.claims.get(i))]
        others = {claim.id: why for claim in held if (why := _wrong(claim, found)) is not None}
        former: Sequence[SlotKey] = ()
        if taken or minds_claims:
            former = self._former(found, listing)
            free = [device_id for device_id in place.ids if device_id not in listing.claims]
            back = kept_back(place.resource, place.ids, free, former)
            listing.keep_back(found, place.ids, back, crowded=len(former) > len(free))
            why = listing.withheld or taken
            kept = dict.fromkeys(free, why) if why and health.offered else {}
            others = {**kept, **back, **others}
        for device_id, why in others.items():
            listing.put(Slot(device_id, device, why))
        listing.put_device([i for i in place.ids if i not in others] if others else place.ids, device, health)
        ours = (device_id for resource, device_id in former if resource == place.resource)
        self._write_former(listing, (listing.claims[i] for i in ours if i not in listing.owners))

    def write_minding(self, hardware: Iterable[str]) -> None:
        """Write the devices that own or depend on this hardware."""
        for found in {it for name in hardware for it in self._index.minded.get(name, ())}:
            self.write_device(found)

    def write_all(self, slots: Iterable[tuple[str, str]]) -> None:
        """Write many slots; a device that has several of them is written once."""
        devices: dict[Found, None] = {}
        for resource, device_id in slots:
            listing = self._lists[resource]
            if listing.keeps_back and (found := listing.owners.get(device_id)) is not None:
                devices[found] = None
            else:
                self._write_slot((resource, device_id))
        for found in devices:
            self.write_device(found)

    def _write_slot(self, slot: tuple[str, str]) -> None:
        """Write one slot from what is known: its device, else its claim's tombstone, else nothing."""
        resource, device_id = slot
        listing = self._lists[resource]
        claim = listing.claims.get(device_id)
        if (found := listing.owners.get(device_id)) is not None:
            if listing.keeps_back or self._taken(found):
                self.write_device(found)
                return
            wrong = _wrong(claim, found) if claim is not None else None
            listing.put(Slot(device_id, found.device, wrong or self._health_of(found)))
        elif claim is not None:
            self._write_former(listing, [claim])
        else:
            listing.drop([device_id])

    def minds_claims(self, found: Found) -> bool:
        """May a device's slots depend on which pods hold what?"""
        place = found.placed
        keeps_back = place is not None and self._lists[place.resource].keeps_back
        return keeps_back or bool(self._holding(found.device))

    def minds_claim(self, found: Found, claim: Held) -> bool:
        """May any slot be another because a pod holds by this claim what is behind its ID?"""
        device = found.device
        return (
            self._lists[claim.resource].keeps_back
            or bool(claim.trouble)
            or not self._health.keys().isdisjoint(device.hardware | device.depends)
            or not self._foreign.by_hardware.keys().isdisjoint(device.hardware)
            or any(len(self._index.at.get(name, ())) > 1 for name in places(claim))
        )

    def touch(self, found: Found) -> None:
        """Have all be written, by `write_touched`, for which it may matter that a device comes, goes or changes its place."""
        if not self._held.by_place:
            return
        self._touched |= places(found.device)
        slots = self._holding(found.device)
        if (place := found.placed) is not None and (claims := self._lists[place.resource].claims):
            slots |= {(place.resource, device_id) for device_id in claims.keys() & set(place.ids)}
        self.touch_claims(self._held.by_slot[slot] for slot in slots)

    def touch_claims(self, claims: Iterable[Held]) -> None:
        """The same where these claims are others than before."""
        for claim in claims:
            self._touched |= places(claim)

    def write_touched(self) -> None:
        """Write the devices at the places that were touched."""
        touched, self._touched = self._touched, set()
        for found in {it for name in touched for it in self._index.at.get(name, ())}:
            self.write_device(found)

    def _taken(self, found: Found) -> Health | None:
        """Why the free ID of a device is not to be had: what a pod holds is at its place, or was; None if it may be.

        It may be the pod's own device, which was plugged in again or has new firmware, and so another node or other IDs.
        While the pod's device is there under its ID, others have parts of what is there (the nodes of a stick), and only
        who has the whole, and who has a part of it, exclude each other.
        """
        if not self._held.by_place or not _is_for_one(found):
            return None
        there = [self._held.by_place[name] for name in places(found.device) if name in self._held.by_place]
        taking: list[SlotKey] = []
        for alike, ids in {alike: ids for at in there for alike, ids in at.items()}.items():
            owners = self._lists[alike[0]].owners
            its_owners = set(map(owners.get, ids))
            for owner in its_owners:  # a thousand tokens of one device are judged once
                slot = alike[0], min(ids if len(its_owners) == 1 else (one for one in ids if owners.get(one) is owner))
                claim = self._held.by_slot[slot]
                home = self._home(claim)
                if home is not found and (
                    home is None or (_is_for_one(home) and owns_its_place(claim) != owns_its_place(found.device))
                ):
                    taking.append(slot)
        if not taking:
            return None
        first = min(taking)
        return beside(*first, min(places(self._held.by_slot[first]) & places(found.device)))

    def _home(self, claim: Held) -> Found | None:
        """The device that a pod was given, if it is there: under its ID, or under another."""
        owner = self._lists[claim.resource].owners.get(claim.id)
        if owner is not None and is_same(claim, owner.device):
            return owner
        return next(iter(self._homes(claim)), None)

    def _homes(self, claim: Held) -> list[Found]:
        """The devices with hardware that a pod was given. A stick is known by its port, too: its numbers do not last."""
        found = self._index.owners(claim.hardware)
        if claim.place and owns_its_place(claim):
            found += (it for name in claim.place for it in self._index.at.get(name, ()) if owns_its_place(it.device))
        return [it for it in dict.fromkeys(found) if is_same(claim, it.device)]

    def _holding(self, device: Device) -> set[SlotKey]:
        """The slots of the pods that hold some of a device: what `_homes` finds, seen from the device."""
        slots = {slot for name in device.hardware for slot in self._held.by_hardware.get(name, ())}
        if device.place and owns_its_place(device):
            theirs = ((it, ids) for name in device.place for it, ids in self._held.by_place.get(name, {}).items())
            for it, ids in theirs:
                if owns_its_place(self._held.by_slot[it[0], next(iter(ids))]):
                    slots.update((it[0], one) for one in ids)
        return slots

    def _former(self, found: Found, listing: Listing) -> list[SlotKey]:
        """What pods hold a device under that is not one of its IDs, sorted.

        It is of another resource; or no device has that ID now; or another one does, and only one may have what the pod holds.
        """
        device, claims = found.device, self._held.by_slot
        return sorted(
            slot
            for slot in self._holding(device)
            if slot[0] != listing.resource or listing.owners.get(slot[1]) is not found
            if (is_same(claims[slot], device) and (slot[0] != listing.resource or slot[1] in listing.astray))
            or not claims[slot].hardware.isdisjoint(device.exclusive)
        )

    def _write_former(self, listing: Listing, claims: Iterable[Held]) -> None:
        """Write the slots of claims whose IDs no device has; a thousand of one device are judged once."""
        behind: dict[tuple[frozenset[str], str, frozenset[str], str], tuple[Device | None, Health]] = {}
        for claim in claims:
            if (key := (claim.hardware, claim.identity, claim.place, claim.trouble)) not in behind:
                behind[key] = self._behind(claim)
            listing.put(Slot(claim.id, *behind[key]))

    def _behind(self, claim: Held) -> tuple[Device | None, Health]:
        """What is behind an ID that no device has: the device that the pod holds, and how it is; None of a tombstone.

        The ID is as healthy as what the pod holds while all of that is there and in the claim's resource: the pod may start
        again, survive a reboot, and counts once for the scheduler. It takes the place of the ID that is kept back for it.
        """
        homes = [found for found in self._homes(claim) if found.placed and found.placed.resource == claim.resource]
        needs, has = claim.hardware, frozenset[str]().union(*(found.device.hardware for found in homes))
        if claim.place and owns_its_place(claim):
            needs, has = claim.place, frozenset[str]().union(*(found.device.place for found in homes))
        if not needs or not needs <= has:
            return None, self._tombstone(claim)
        home = max(homes, key=lambda found: len(found.device.hardware & claim.hardware))
        if not self._lists[claim.resource].crowded.isdisjoint(homes):
            return home.device, CROWDED
        if (wrong := _wrong(claim, home)) is not None:
            return home.device, wrong
        states = {(health := self._health_of(found)).state: health for found in reversed(homes)}
        return home.device, states.get(State.UNHEALTHY) or states.get(State.DEGRADED) or HEALTHY

    def withhold(self) -> None:
        """Claims or devices changed: keep what is free from pods, or no more, where a resource is to be strict about that."""
        for listing in self._lists.values():
            resource = self._selection.resources.get(listing.resource)
            unmapped = listing.unmapped() if resource and resource.configured in self.strict else frozenset()
            why = withheld(unmapped) if unmapped else None
            if why != listing.withheld:
                listing.withheld = why
                for found in set(listing.owners.values()):
                    self.write_device(found)

    def _health_of(self, found: Found) -> Health:
        health = condition(found.device, self._health_of_hardware) if self._health else HEALTHY
        if self._foreign.by_slot and health.offered and (claim := self.held_elsewhere(found)) is not None:
            return elsewhere(*claim.slot)
        return health

    def _health_of_hardware(self, name: str) -> Health:
        health = self._health.get(name, HEALTHY)
        return health.to_holder if name in self._held.by_hardware else health

    def held_elsewhere(self, found: Found) -> Held | None:
        """The claim of a pod that has a device's hardware through a resource which is not ours.

        It keeps a device from others that only one pod may have at a time. Of one with several IDs the operator has said
        that pods may share it; which others use it, too, is not ours to count: a plugin that lives gives such a node to
        any number of pods (/dev/kvm, /dev/fuse). What a pod of ours has by now stays as it is, and is not given again.
        """
        place = found.placed
        if place is None or len(place.ids) != 1 or (place.resource, place.ids[0]) in self._held.by_slot:
            return None
        return self._given_elsewhere(found)

    def why_not_again(self, slot: SlotKey) -> Health | None:
        """Why an ID that a pod holds, as far as is known here, is not to be given to the next one; None if it may be.

        It stays healthy for that pod. The kubelet learns first that the pod has ended, and another plugin may have given
        the hardware away by then.
        """
        if slot not in self._held.by_slot:
            return None
        listing = self._lists[slot[0]]
        found = listing.owners.get(slot[1])
        if self._foreign.by_slot and found is not None:
            is_only_one = found.placed is not None and len(found.placed.ids) == 1
            if is_only_one and (claim := self._given_elsewhere(found)) is not None:
                return elsewhere(*claim.slot)
        return listing.withheld or (self._taken(found) if found is not None else None)

    def is_for_one(self, slot: SlotKey) -> bool:
        """May only one pod at a time have what is behind this ID, as far as the operator has said?"""
        listing = self._lists[slot[0]]
        found, claim = listing.owners.get(slot[1]), listing.claims.get(slot[1])
        if found is None and claim is not None:
            found = self._home(claim)
        return found is not None and _is_for_one(found)

    def _given_elsewhere(self, found: Found) -> Held | None:
        """The first claim of a pod that has a device's hardware through a resource which is not ours."""
        slots = {slot for name in found.device.hardware for slot in self._foreign.by_hardware.get(name, ())}
        return self._foreign.by_slot[min(slots)] if slots else None

    def rewrite_tombstones(self, device: Device) -> None:
        """A device that is there and cannot be used came or went: pods that hold its hardware are told why."""
        self.write_all({slot for h in device.hardware for slot in self._held.by_hardware.get(h, ())})

    def _tombstone(self, claim: Held) -> Health:
        if claim.resource not in self._selection.resources:
            return retired(claim.resource)
        why = next((why for it in self._index.owners(claim.hardware) if (why := it.device.unusable)), "")
        if why:
            return unusable(why)
        return GONE if claim.hardware else UNMAPPED


def _wrong(claim: Held, found: Found) -> Health | None:
    """Why the slot of a pod that has this device, or another in its place, is Unhealthy, however the device is."""
    if not is_same(claim, found.device):
        return replaced(claim, found.device)
    return TROUBLES.get(claim.trouble) if claim.trouble and _is_for_one(found) else None


def _is_for_one(found: Found) -> bool:
    """Is a device for one pod at a time, as far as the operator has said? Of several IDs, or `shared`, he has said otherwise."""
    nodes = found.device.nodes
    return (found.placed is None or len(found.placed.ids) == 1) and not (nodes and all(it.shared for it in nodes))
