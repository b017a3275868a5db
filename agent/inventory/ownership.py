"""Decides who owns what: which resource gets each device, which pod's it is, and what each ID says of it. Pure.

`decide` is a function of what is known: the resources, the devices, their health, and what pods hold. It keeps nothing, so
that the order in which things happened cannot matter. `inventory.py` keeps its answers. It asks again about the devices and
claims that a change may concern, and what differs from the answer before is what the kubelet is told. A reload asks about
everything, for other resources.

What lives how long:

- A device is known until a scan of its unit does not find it. The resources that select it, and the IDs that it has there,
  are asked for once, when it comes. A list of 4 MiB takes none that comes then, until there is room.
- A claim lives from the Allocate until both witnesses have told the ledger that the pod has ended. While it does, its ID is
  listed, with a device or without.
- The name that a template gives belongs to the value that was there first, for as long as it is served.
- Health that is not HEALTHY is dated by the part that tells of it. What is decided here is not: the list that shows it first
  dates it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from agent.health.causes import PLUGGED
from agent.inventory.selection import Candidate, Found, Selection
from agent.model import FORGOTTEN, HEALTHY, TWO_PODS, Health, Held, ResourceClaim, Slot, SlotKey, State
from agent.runtime.errors import some
from backends.base import Device


class Decision(Struct, frozen=True):
    """What follows from all that is known."""

    lists: Mapping[str, dict[str, Slot]]
    """Resource → ID → its slot."""
    placed: Mapping[Found, Candidate]
    """The resource that each device joined."""
    rejected: Mapping[Found, tuple[str, ...]]
    """Why resources that select a device did not get it."""
    barred: Mapping[Found, Health]
    """Why no further pod may have a device, although its hardware is well: also one whose IDs all have pods."""


def decide(
    selection: Selection, found: Iterable[Found], health: Mapping[str, Health], held: Holdings, foreign: Holdings
) -> Decision:
    """Decide about all devices and claims, or about some that share nothing with the others (`Inventory._connected`).

    Args:
        selection: the resources in force.
        found: the devices, with the resources that select each.
        health: of hardware that is not healthy.
        held: what pods hold through our resources.
        foreign: what they hold through other plugins'.
    """
    every = sorted(found, key=lambda it: it.ref)
    lists: defaultdict[str, dict[str, Slot]] = defaultdict(dict)
    barred: dict[Found, Health] = {}

    # 1. Each device joins the first resource that may have it. What pods hold is decided before anything else.
    outcome = assign(every, held, selection.stands_for)
    placed, owners = outcome.placed, outcome.owners

    def is_for_one(it: Found) -> bool:
        return is_meant_for_one(it.device, placed.get(it))

    def wrong_with(claim: Held, owner: Found) -> Health | None:
        """Why the slot of a pod that has this device, or another in its place, is Unhealthy, however the device is."""
        if not is_same(claim, owner.device) or has_other_nodes(claim, owner.device):
            return replaced(claim, owner.device)
        if claim.claim is not None and selection.is_by_plugin(claim.resource):  # the kubelet would give it to a pod
            return claimed(claim.claim)
        return TROUBLES.get(claim.trouble) if claim.trouble and is_for_one(owner) else None

    def health_of_hardware(name: str) -> Health:
        known = health.get(name, HEALTHY)
        return known.to_holder if name in held.by_hardware else known

    def health_of(it: Found) -> Health:
        own = condition(it.device, health_of_hardware) if health else HEALTHY
        if foreign.by_slot and own.offered and len(ids := placed[it].ids) == 1:
            return own if (placed[it].resource, ids[0]) in held.by_slot else _given_elsewhere(it, foreign) or own
        return own

    # 2. Only one pod may have it, and one has it through another plugin's resource.
    if foreign.by_slot:
        barred.update((it, why) for it in placed if len(placed[it].ids) == 1 and (why := _given_elsewhere(it, foreign)))

    # 3. A pod holds an ID of a resource with `adopt = "strict"`, and nothing tells what is behind it: it may be any device.
    for name in {claim.resource for claim in held.by_slot.values() if not claim.hardware}:
        if selection.is_strict(name):
            of_resource = (claim for claim in held.by_slot.values() if claim.resource == name and not claim.hardware)
            if unmapped := frozenset(claim.id for claim in of_resource if claim.id not in owners[name]):
                for it in placed:
                    if placed[it].resource == name:
                        barred.setdefault(it, withheld(unmapped))

    # 4. Where what each pod was given is now. A device at the place of one that is not there is kept from others.
    at: defaultdict[str, list[Found]] = defaultdict(list)  # hardware or place → the devices there
    for it in every if held.by_slot else ():
        for name in it.device.hardware | it.device.place:
            at[name].append(it)
    given = _located(held, at, outcome, wrong_with, is_for_one)
    for it, slots in given.at_its_place.items():
        claim = held.by_slot[min(slots)]
        barred.setdefault(it, held_at_its_place(*claim.slot, min(places(claim) & places(it.device))))

    # 5. The IDs of each device say how it is,
    crowded = set[Found]()
    for it, place in placed.items():
        name, own, listed = place.resource, health_of(it), lists[place.resource]
        if not held.by_slot and it not in barred:
            listed.update(zip(place.ids, map(Slot, place.ids, repeat(it.device), repeat(own)), strict=True))
            continue
        free = [device_id for device_id in place.ids if (name, device_id) not in held.by_slot]
        others = sorted(given.under_other_ids.get(it, ()))
        back = kept_back(name, place.ids, free, others)
        if len(others) > len(free):
            crowded.add(it)
        says = dict.fromkeys(place.ids, own)
        if own.offered and it in barred:  # 5a. but no pod may have those that are free,
            says.update(dict.fromkeys(free, barred[it]))
        says.update(back)  # 5b. some are kept back for pods that have it under other IDs,
        for device_id in place.ids if given.wrong else ():  # 5c. and a pod may have another than is there.
            if (why := given.wrong.get((name, device_id))) is not None:
                says[device_id] = why
        listed.update(zip(says, map(Slot, says, repeat(it.device), says.values()), strict=True))

    # 6. An ID that a pod holds and no device has
    def listed_for_its_pod(claim: Held, same: Sequence[Found]) -> tuple[Device | None, Health]:
        by_place = is_known_by_its_place(claim)
        needs = claim.place if by_place else claim.hardware

        def are_whole(those: Iterable[Found]) -> bool:
            has = frozenset[str]().union(*(it.device.place if by_place else it.device.hardware for it in those))
            return bool(needs) and needs <= has

        there = [it for it in same if it in placed and placed[it].resource == claim.resource]
        # 6a. has the device that the pod was given, while all of it is there and in the claim's resource: the pod may start
        # again, survive a reboot, and counts once for the scheduler. It takes the place of an ID that is kept back.
        if are_whole(there):
            first = max(there, key=lambda it: len(it.device.hardware & claim.hardware))
            if not crowded.isdisjoint(there):
                return first.device, CROWDED
            states = {(state := health_of(it)).state: state for it in reversed(there)}
            worst = states.get(State.UNHEALTHY) or states.get(State.DEGRADED) or HEALTHY
            return first.device, wrong_with(claim, first) or worst
        # 6b. is a tombstone of a resource that is configured no more,
        if claim.resource not in selection.resources:
            return None, retired(claim.resource)
        # 6c. of hardware that is there and cannot be used (another stick at its port is known by its identity; what a GPU is
        # called, only its driver tells),
        unfit = [it for it in given_to(claim, at) if it.device.unusable and _share(claim, it)]
        if whys := [it.device.unusable for it in unfit if it in same or not claim.place]:
            return None, unusable(whys[0])
        # 6d. of hardware that is there, and that no resource takes any more,
        if are_whole(it for it in same if it not in placed):
            return None, unusable(f"{claim.resource} does not take it any more")
        # 6e. or of hardware that is gone, or was never known.
        return None, HELD_AND_GONE if claim.hardware else UNMAPPED

    for claim, same, ids in given.without_owner:
        device, health_of_it = listed_for_its_pod(claim, same)
        lists[claim.resource].update((device_id, Slot(device_id, device, health_of_it)) for device_id in ids)
    return Decision(lists, placed, outcome.rejected, barred)


class _Located(Struct):
    """Where what pods were given is now."""

    wrong: dict[SlotKey, Health]
    """What is Unhealthy of a pod's, though its device may be well."""
    under_other_ids: defaultdict[Found, list[SlotKey]]
    """What pods have of a device by IDs that it lacks."""
    at_its_place: defaultdict[Found, list[SlotKey]]
    """Device → the slots of pods whose own device, at the same place, keeps it from others."""
    without_owner: list[tuple[Held, list[Found], list[str]]]
    """The first of alike claims that have IDs which no device has, the devices that they are of, and those IDs."""


def _located(
    held: Holdings,
    at: Mapping[str, list[Found]],
    outcome: Outcome,
    wrong_with: Callable[[Held, Found], Health | None],
    is_for_one: Callable[[Found], bool],
) -> _Located:
    """Find what each pod was given; `at` has the devices by hardware and place. Alike tokens are judged once."""
    given = _Located({}, defaultdict(list), defaultdict(list), [])
    for alike in held.alike():
        claim = alike[0]
        near = given_to(claim, at)
        same = [it for it in near if is_same(claim, it.device)]
        by_owner: defaultdict[Found | None, list[SlotKey]] = defaultdict(list)  # the device that has their IDs now
        for one in alike:
            by_owner[outcome.owners[one.resource].get(one.id)].append(one.slot)
        first_of: dict[Found | None, SlotKey] = {}  # the device they were given → the first; None: it is away
        for owner, slots in by_owner.items():
            owner_is_same = owner is not None and is_same(claim, owner.device)
            has = owner if owner_is_same else next(iter(same), None)
            first_of[has] = min(*slots, first_of.get(has, slots[0]))
            if owner is not None and (why := wrong_with(claim, owner)) is not None:
                given.wrong.update(dict.fromkeys(slots, why))
            # 4a. The device has other IDs now: as many of them are kept back as pods have it by IDs that it lacks.
            for it in near:
                if it is not owner and (place := outcome.placed.get(it)) is not None:
                    is_displaced = it in same and (claim.resource != place.resource or not owner_is_same)
                    if is_displaced or not claim.hardware.isdisjoint(it.device.exclusive):
                        given.under_other_ids[it] += slots
        if by_owner[None]:
            given.without_owner.append((claim, same, [device_id for _, device_id in by_owner[None]]))
        # 4b. A device at the place of a pod's is kept from others. The pod's may not be there: this may be it, plugged in
        # again or with new firmware. If it is there, one of the two is the whole (a stick) and the other a part (its node).
        around = {it for name in places(claim) for it in at.get(name, ()) if name in places(it.device)}
        for it in (it for it in around if it in outcome.placed and is_for_one(it)):
            is_part_of_other = owns_its_place(claim) != owns_its_place(it.device)
            for has, slot in first_of.items():
                if has is None or (has is not it and is_for_one(has) and is_part_of_other):
                    given.at_its_place[it].append(slot)
    return given


def _given_elsewhere(it: Found, foreign: Holdings) -> Health | None:
    """Why no pod of ours gets a device that a pod has through another plugin's resource; None if none has.

    It keeps a device from others that only one pod may have at a time. Of one with several IDs the operator has said
    that pods may share it; which others use it, too, is not ours to count: a plugin that lives gives such a node to
    any number of pods (/dev/kvm, /dev/fuse). What a pod of ours has by now stays as it is, and is not given again.
    """
    claim = foreign.first_of(it.device.hardware)
    return elsewhere(*claim.slot) if claim is not None else None


def is_meant_for_one(device: Device, place: Candidate | None) -> bool:
    """Whether the operator lets only one pod at a time have a device: not if it has several IDs, or is `shared`."""
    return (place is None or len(place.ids) == 1) and not (device.nodes and all(it.shared for it in device.nodes))


def _share(claim: Held, it: Found) -> bool:
    return not claim.hardware.isdisjoint(it.device.hardware)


# --- health ---


def condition(device: Device, health_of: Callable[[str], Health]) -> Health:
    """The worst of its own hardware and of what it depends on.

    One that can do with some of it is unhealthy once all its parts are, and degraded while some are.
    """
    if not device.parts:
        return _worst(device.hardware | device.depends, health_of)
    depends = _worst(device.depends.difference(*device.parts), health_of)
    if depends.state is State.UNHEALTHY:
        return depends
    parts = [_worst(part, health_of) for part in device.parts]
    bad = [health for health in parts if health.state is State.UNHEALTHY]
    if bad and len(bad) < len(parts):
        return _degraded(bad[0])
    return next((health for health in (*bad, depends, *parts) if health is not HEALTHY), HEALTHY)


def _worst(hardware: Iterable[str], health_of: Callable[[str], Health]) -> Health:
    """Of several that are equally bad, that of the first name."""
    states = {(health := health_of(name)).state: health for name in sorted(hardware, reverse=True)}
    return states.get(State.UNHEALTHY) or states.get(State.DEGRADED) or HEALTHY


@lru_cache(maxsize=256)  # the same object for the same health: lists tell by that what has changed
def _degraded(health: Health) -> Health:
    return replace(health, state=State.DEGRADED, while_held=None)


# --- which resource gets which device ---


class Outcome(Struct):
    """The candidate that each device joined, and for each refusal the reason."""

    placed: dict[Found, Candidate]
    rejected: dict[Found, tuple[str, ...]]
    owners: defaultdict[str, dict[str, Found]]
    """Resource → ID → the device that has it."""


def assign(found: Iterable[Found], held: Holdings, stands_for: Mapping[str, str] = MappingProxyType({})) -> Outcome:
    """Decide who gets which device, among devices that share hardware or IDs with no others.

    Hardware that a pod holds belongs to the pod's resource before any other decision, and the IDs that pods hold go
    to the devices they have: those with exactly the hardware and identity that a pod was given before those with some of
    it, and of these the one that more pods point at. Then, in the order of the config, each resource takes the devices it
    selects whose hardware is free or already its own. A name that a template made of a value is for devices with that value
    alone. What is exclusive is offered by one device alone, and while a pod holds it under its ID alone.

    Args:
        found: the devices, in the order of their refs.
        held: what pods hold.
        stands_for: name that a template gave → of which value; a device with another value cannot have it, too.
    """
    outcome = Outcome({}, {}, defaultdict(dict))
    resource_of: dict[str, str] = {}  # hardware → resource
    device_with: dict[str, Device] = {}  # hardware → the last device that got it
    values = dict(stands_for)
    if held.by_hardware:
        for it in found:
            for hardware in it.device.hardware:
                if slots := held.by_hardware.get(hardware):
                    resource_of[hardware] = min(resource for resource, _ in slots)
    bids = [
        (_pull(it.device, candidate, held.by_slot) if held.by_slot else (0, 0), candidate.order, it.ref, candidate, it)
        for it in found
        for candidate in it.candidates
    ]
    for *_, candidate, it in sorted(bids, key=lambda bid: bid[:3]):
        if it in outcome.placed:
            continue
        device, name = it.device, candidate.resource
        if (value := values.get(name, candidate.value)) != candidate.value:
            why: str | None = f"that name stands for {value} already, and this has {candidate.value}"
        else:
            why = _obstacle(device, candidate, resource_of, device_with, outcome.owners[name], held)
        if why is not None:
            outcome.rejected[it] = (*outcome.rejected.get(it, ()), f"{name} selects it, but {why}")
            continue
        outcome.placed[it] = candidate
        values.setdefault(name, candidate.value)
        resource_of.update(dict.fromkeys(device.hardware, name))
        device_with.update(dict.fromkeys(device.hardware, device))
        outcome.owners[name].update(dict.fromkeys(candidate.ids, it))
    return outcome


def piece(device: Device) -> frozenset[str]:
    """The hardware that a device is by its key: of an IOMMU group the function that names it, not its companions."""
    named = f"pci:{device.key}"
    return frozenset({named}) if named in device.hardware else device.hardware


def _pull(device: Device, candidate: Candidate, claims: Mapping[SlotKey, Held]) -> tuple[int, int]:
    """How strongly pods draw the device to the resource, the least first: minus those who have it, who may have it.

    A claim that an Allocate adds to a device never puts another before it: counted, it could only have been before.
    """
    have = may_have = 0
    for device_id in candidate.ids:
        claim = claims.get((candidate.resource, device_id))
        if claim is None:
            continue
        is_where_it_was = claim.place == device.place if claim.place else claim.hardware == device.hardware
        if is_where_it_was and claim.identity in ("", device.identity, *device.aliases):
            have += 1
        elif not claim.hardware or not claim.hardware.isdisjoint(device.hardware) or is_same(claim, device):
            may_have += 1
    return -have, -may_have


def _obstacle(
    device: Device,
    candidate: Candidate,
    resource_of: Mapping[str, str],
    device_with: Mapping[str, Device],
    owners: Mapping[str, Found],
    held: Holdings,
) -> str | None:
    """Why the resource cannot have the device, or should not offer it, or None.

    It should not where it has exclusive hardware of the device under another name, or a pod holds that so. A pod's other ID
    does not matter to a device with several, which pods share, nor to one that is held itself, nor where the pod has all of
    the device: it is listed for that pod, and kept back from others.
    """
    name, ids = candidate.resource, candidate.ids
    unshared = len(ids) == 1 and (name, ids[0]) not in held.by_slot
    for hardware in sorted(device.hardware):
        if (resource := resource_of.get(hardware, name)) != name:
            verb = "is held by a pod through" if held.by_hardware.get(hardware) else "belongs to"
            what = hardware if hardware in piece(device) else f"{hardware}, which goes with it,"
            whole = device_with.get(hardware)
            part = f", as part of {whole.key}" if whole is not None and hardware not in piece(whole) else ""
            return f"{what} {verb} {resource}{part}"
        if (other := device_with.get(hardware)) is not None and hardware in device.exclusive | other.exclusive:
            return f"{hardware} is offered as {other.key} already"
        if unshared and hardware in device.exclusive:
            for slot in sorted(held.by_hardware.get(hardware, ())):
                if slot[0] == name and slot[1] not in ids and not held.by_slot[slot].hardware >= device.hardware:
                    return f"{hardware} is held by a pod as {slot[1]}"
    if owners:
        for device_id in ids:
            if (owner_of_it := owners.get(device_id)) is not None:
                return f"its ID {device_id} is that of {owner_of_it.device.key}"
    return None


# --- what pods' claims mean for slots ---


HELD_AND_GONE: Final = Health(State.UNHEALTHY, "gone", "the device is gone; a pod still holds it")
UNMAPPED: Final = Health(
    State.UNHEALTHY, "unmapped", "a pod holds it, and nothing that the pod was given leads to a device of this node"
)
TROUBLES: Final = {
    FORGOTTEN: Health(
        State.UNHEALTHY, FORGOTTEN,
        "a pod holds it, and the kubelet, which lost its record of that, would give it to another pod",
    ),
    TWO_PODS: Health(
        State.UNHEALTHY, TWO_PODS,
        "two pods hold it at the same time, because the kubelet gave it out twice: delete one of them",
    ),
}  # fmt: skip
"""Of a slot for one pod, by the trouble of its claim."""
CROWDED: Final = Health(State.UNHEALTHY, "held", "more pods hold the same hardware than may have it")


def claimed(by: ResourceClaim) -> Health:
    """Of an ID of a resource that is served by device plugin now, and that a ResourceClaim has from before."""
    message = f"ResourceClaim {by.namespace}/{by.name} has it, by dynamic resource allocation"
    return Health(State.UNHEALTHY, CROWDED.reason, message)


NOT_SEEN: Final = "not-seen"
"""The reason that faces show instead while the backend could not look whether the device is there."""


class Holdings:
    """Claims, by their slots, by their hardware and by their places."""

    def __init__(self, claims: Iterable[Held] = ()) -> None:
        self.by_slot: dict[SlotKey, Held] = {}
        self.by_hardware: defaultdict[str, set[SlotKey]] = defaultdict(set)
        """Hardware → the slots of the pods that hold it; never an empty set."""
        self.by_place: defaultdict[str, set[SlotKey]] = defaultdict(set)
        """The same by `Held.place`."""
        for claim in claims:
            self.add(claim)

    def add(self, claim: Held) -> Held | None:
        """Keep this claim; returns the one that its slot had before, which may be equal."""
        slot = claim.slot
        if (before := self.by_slot.get(slot)) is not None:
            if before == claim:
                return before
            self.remove(slot)
        self.by_slot[slot] = claim
        for name in claim.hardware:
            self.by_hardware[name].add(slot)
        for name in claim.place:
            self.by_place[name].add(slot)
        return before

    def remove(self, slot: SlotKey) -> Held:
        """Forget the claim of this slot; returns it."""
        claim = self.by_slot.pop(slot)
        for index, names in ((self.by_hardware, claim.hardware), (self.by_place, claim.place)):
            for name in names:
                index[name].discard(slot)
                if not index[name]:
                    del index[name]
        return claim

    def first_of(self, hardware: Iterable[str]) -> Held | None:
        """The first claim, by its slot, of a pod that holds any of this."""
        slots = [min(self.by_hardware[name]) for name in hardware if name in self.by_hardware]
        return self.by_slot[min(slots)] if slots else None

    def alike(self) -> list[list[Held]]:
        """The claims, those of one device's tokens together: all that differs is the ID."""
        groups: defaultdict[tuple[Hashable, ...], list[Held]] = defaultdict(list)
        for it in self.by_slot.values():
            of_whom = it.claim and (it.claim.namespace, it.claim.name)
            groups[it.resource, it.hardware, it.identity, it.place, it.trouble, of_whom, it.rebooted].append(it)
        return list(groups.values())


def places(of: Held | Device) -> frozenset[str]:
    """Where a device is, or a pod's was: the port it is plugged into, the PCI function that it is or stands on."""
    return of.place.union(name for name in of.hardware if name.startswith("pci:"))


def owns_its_place(of: Held | Device) -> bool:
    """Whether a device is all that is there: a stick and not a node of it, a GPU and not a node of its driver."""
    return any(name.startswith(PLUGGED) for name in of.hardware)


def is_known_by_its_place(claim: Held) -> bool:
    """Whether a pod's device is found by where it is plugged in: a stick, whose numbers do not last."""
    return bool(claim.place) and owns_its_place(claim)


def is_same(claim: Held, device: Device) -> bool:
    """Whether this is the card that the pod was given. What cannot be seen of it now tells nothing.

    Numbers of nodes and of buses are others after a boot, or once it was plugged in again: its place is not.
    `has_other_nodes` tells what that means for a pod that runs.
    """
    if claim.identity and device.identity and claim.identity not in (device.identity, *device.aliases):
        return False
    if claim.place and device.place:  # of one the other port of a socket (USB 2 and 3) may not be known yet
        return claim.place <= device.place or device.place <= claim.place
    return not claim.hardware or not claim.hardware.isdisjoint(device.hardware)


def has_other_nodes(claim: Held, device: Device) -> bool:
    """Whether the pod's own stick was plugged in again and has other nodes since: those that the pod has lead nowhere.

    Nodes that only went tell nothing: a program that uses the stick itself takes it from its driver, and with it `ttyUSB0`. Nor
    does another identity: a stick that got its firmware stays the pod's. Hardware that is no stick keeps its nodes' numbers, or
    has links to them, which a container that starts again follows.
    """
    if claim.hardware <= device.hardware or claim.rebooted or claim.identity != device.identity or not claim.identity:
        return False
    if not any(name.startswith("usb:") for name in claim.hardware):
        return False
    was, now = ({name for name in it.hardware if name.startswith("node:")} for it in (claim, device))
    return not (was <= now or now <= was)


def given_to(claim: Held, at: Mapping[str, Iterable[Found]]) -> list[Found]:
    """The devices that have some of what a pod was given, or are where that was; those with its hardware come first.

    Args:
        claim: the pod's.
        at: hardware, or a place → the devices there.
    """
    found = {it for name in claim.hardware for it in at.get(name, ()) if name in it.device.hardware}
    there = sorted(found, key=lambda it: it.ref)
    if is_known_by_its_place(claim):
        plugged = {it for name in claim.place for it in at.get(name, ()) if name in it.device.place} - found
        there += sorted((it for it in plugged if owns_its_place(it.device)), key=lambda it: it.ref)
    return there


def replaced(claim: Held, device: Device) -> Health:
    """Of a slot that has another device than its pod was given (`agent.model.REPLACED` says who else says so)."""
    reason = "node-replaced" if any(name.startswith("node:") for name in claim.hardware) else "replaced"
    was, now = (" at ".join(filter(None, (it.identity, *sorted(it.place)))) for it in (claim, device))
    if was == now:
        was, now = (", ".join(sorted(it.hardware)) for it in (claim, device))
    return Health(State.UNHEALTHY, reason, f"it is {now} now; the pod that holds it was given {was}")


def retired(resource: str) -> Health:
    """Of a slot whose resource is no longer configured."""
    return Health(State.UNHEALTHY, "retired", f"{resource} is no longer configured")


@lru_cache(maxsize=1024)  # the same object for the same claim: lists tell by that what has changed
def held_at_its_place(resource: str, device_id: str, where: str) -> Health:
    """Of a free slot whose device is where that of a pod is, or was."""
    return Health(State.UNHEALTHY, "held", f"a pod holds what is or was at {where}, as {resource}/{device_id}")


@lru_cache(maxsize=1024)  # as above
def elsewhere(resource: str, device_id: str) -> Health:
    """Of a slot whose hardware a pod has through another plugin's resource."""
    return Health(State.UNHEALTHY, "held", f"a pod holds it through {resource}/{device_id}, which another plugin gave")


def unusable(why: str) -> Health:
    """Of a slot whose device is there and cannot be used."""
    return Health(State.UNHEALTHY, "unusable", f"{why}; a pod still holds it")


@lru_cache(maxsize=1024)  # as above
def withheld(unmapped: frozenset[str]) -> Health:
    """Of a free slot of a resource with `adopt = "strict"` while pods hold these IDs and their hardware is unknown."""
    said = (
        f"pods hold {some(sorted(unmapped))} of this resource, and nothing that they were given leads to a device of "
        "this node: this one may be theirs (adopt = 'strict')"
    )
    return Health(State.UNHEALTHY, "withheld", said)


def kept_back(
    resource: str, ids: Sequence[str], free: Sequence[str], former: Sequence[SlotKey]
) -> Mapping[str, Health]:
    """The IDs of a device that no pod can get while pods hold its hardware under IDs that it does not have.

    Its IDs are other ones since the configuration changed, or another plugin gave it; no more pods than it has IDs shall
    have the hardware, or the kubelet would give it away twice (kubelet contract: A7.4). For each such pod, the last free ID
    is kept back, and the pod's ID takes its place. Where there are not so many free ones, all are kept back, also those that
    pods hold: the kubelet learns before we do that such a pod has ended, and the others have the hardware still.

    Args:
        resource: the device's.
        ids: the device's, as they are now.
        free: those of them that no pod holds.
        former: what pods hold the device under and that is none of its IDs.
    """
    if not former:
        return {}
    names = [device_id if name == resource else f"{name}/{device_id}" for name, device_id in former]
    why = Health(State.UNHEALTHY, "held", f"a pod holds the same hardware under another ID, {some(names)}")
    return dict.fromkeys(ids if len(former) > len(free) else free[-len(former) :], why)
