"""Writes the slots of the lists: what the kubelet is told of each device, and of each claim whose device is gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent.inventory.conditions import Conditions
from agent.inventory.found_devices import Found, Indexes, Ref
from agent.inventory.selection import Selection
from agent.inventory.slots import Listing
from agent.inventory.tombstones import GONE, Holdings, elsewhere, is_same, kept_back, replaced, retired, unusable
from agent.model import Health, Held, Slot
from backends.base import Device


class SlotWriter:
    """Reads what an inventory knows, and writes its lists."""

    def __init__(
        self,
        selection: Selection,
        found: Mapping[Ref, Found],
        index: Indexes,
        conditions: Conditions,
        held: Holdings,
        foreign: Holdings,
        lists: Mapping[str, Listing],
    ) -> None:
        """Prepare.

        Args:
            selection: what is configured.
            found: the devices that are there.
            index: where hardware and IDs lead.
            conditions: the health of hardware.
            held: what pods have of our resources.
            foreign: what pods have of our hardware through others.
            lists: to be written.
        """
        self._selection, self._found, self._index, self._conditions = selection, found, index, conditions
        self._held, self._foreign, self._lists = held, foreign, lists

    def withdraw(self, found: Found) -> None:
        """Take a device's slots from the list it is in; the claimed ones become tombstones."""
        place, found.placed = found.placed, None
        if place is None:
            return
        listing = self._lists[place.resource]
        for device_id in place.ids:
            del listing.owners[device_id]
        listing.drop([device_id for device_id in place.ids if device_id not in listing.claims])
        for device_id in listing.claims and listing.claims.keys() & set(place.ids):
            self._write_slot((place.resource, device_id))

    def write_device(self, found: Found) -> None:
        """Write all slots of a placed device; they change together."""
        if (place := found.placed) is None:
            return
        device, health, listing = found.device, self._health_of(found), self._lists[place.resource]
        held = [claim for i in place.ids if (claim := listing.claims.get(i))] if listing.claims else ()
        others = {claim.id: replaced(claim, device) for claim in held if not is_same(claim, device)}
        if listing.keeps_back:
            former = self._held.astray_from(device, place.resource, listing.astray)
            back = kept_back(place.ids, device, listing.claims, former)
            listing.keep_back(place.ids, back)
            others = {**back, **others}
        for device_id, why in others.items():
            listing.put(Slot(device_id, device, why))
        listing.put_device([i for i in place.ids if i not in others] if others else place.ids, device, health)

    def write_minding(self, hardware: Iterable[str]) -> None:
        """Write the devices that own or depend on this hardware."""
        for ref in {ref for name in hardware for ref in self._index.minded.get(name, ())}:
            self.write_device(self._found[ref])

    def write_all(self, slots: Iterable[tuple[str, str]]) -> None:
        """Write many slots; a device that has several of them is written once."""
        devices: dict[Ref, None] = {}
        for resource, device_id in slots:
            listing = self._lists[resource]
            if listing.keeps_back and (ref := listing.owners.get(device_id)) is not None:
                devices[ref] = None
            else:
                self._write_slot((resource, device_id))
        for ref in devices:
            self.write_device(self._found[ref])

    def _write_slot(self, slot: tuple[str, str]) -> None:
        """Write one slot from what is known: its device, else its claim's tombstone, else nothing."""
        resource, device_id = slot
        listing = self._lists[resource]
        claim = listing.claims.get(device_id)
        if (ref := listing.owners.get(device_id)) is not None:
            if listing.keeps_back:
                self.write_device(self._found[ref])
                return
            device = self._found[ref].device
            same = claim is None or is_same(claim, device)
            health = self._health_of(self._found[ref]) if same or claim is None else replaced(claim, device)
            listing.put(Slot(device_id, device, health))
        elif claim is not None:
            listing.put(Slot(device_id, None, self._tombstone(claim)))
        else:
            listing.drop([device_id])

    def _health_of(self, found: Found) -> Health:
        health = self._conditions.of(found.device, self._held.by_hardware)
        if health.offered and self._foreign.by_slot and (claim := self.held_elsewhere(found)) is not None:
            return elsewhere(*claim.slot)
        return health

    def held_elsewhere(self, found: Found) -> Held | None:
        """The claim of a pod that has a device's hardware through a resource which is not ours.

        It keeps a device from others that only one pod may have at a time. Of one with several IDs the operator has said
        that pods may share it; which others use it, too, is not ours to count: a plugin that lives gives such a node to
        any number of pods (/dev/kvm, /dev/fuse). What a pod of ours has by now stays as it is.
        """
        place = found.placed
        if place is None or len(place.ids) != 1 or (place.resource, place.ids[0]) in self._held.by_slot:
            return None
        slots = {slot for name in found.device.hardware for slot in self._foreign.by_hardware.get(name, ())}
        return self._foreign.by_slot[min(slots)] if slots else None

    def judge_held(self, changed: Iterable[Held]) -> None:
        """These claims began or ended: write anew what is another while a pod holds the hardware."""
        self.write_minding(self._conditions.another_while_held(h for claim in changed for h in claim.hardware))

    def rewrite_tombstones(self, device: Device) -> None:
        """A device that is there and cannot be used came or went: pods that hold its hardware are told why."""
        if device.unusable:
            self.write_all({slot for h in device.hardware for slot in self._held.by_hardware.get(h, ())})

    def _tombstone(self, claim: Held) -> Health:
        if claim.resource not in self._selection.resources:
            return retired(claim.resource)
        refs = {ref for hardware in claim.hardware for ref in self._index.owned.get(hardware, ())}
        why = next((why for ref in sorted(refs) if (why := self._found[ref].device.unusable)), "")
        return unusable(why) if why else GONE
