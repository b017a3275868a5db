"""What is advertised: devices, health and claims in; per resource a `Snapshot` out. The only owner of the lists.

Pure and incremental: a change touches the slots it concerns, not the list they are in. Every method that
takes something in marks what it altered; `take` hands out the snapshots of altered resources.

Rules (design, "inventory"): a device joins the first resource that selects it, if none of its hardware
belongs to another resource; claims beat match order; an ID that is claimed but has no device stays as an
Unhealthy tombstone (kubelet contract: A7); another card at the same key is other hardware.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.devices.assignment import Candidate, assign
from agent.devices.found import Found, Indexes, Ref
from agent.devices.listing import Listing
from agent.devices.model import HEALTHY, Health, Held, Slot, Snapshot, State
from backends.base import Backend, Device, Resource


@dataclass(frozen=True, slots=True)
class Unclaimed:
    """A device that no resource has, and why."""

    device: Device
    backend: str
    why: str


class Inventory:
    """The lists of all resources, and who owns which hardware."""

    def __init__(self, resources: Sequence[Resource[Any]], backends: Mapping[str, Backend[Any]]) -> None:
        self._resources = {resource.name: resource for resource in resources}
        self._order = {name: n for n, name in enumerate(self._resources)}
        self._backends = backends
        self._found: dict[Ref, Found] = {}
        self._units: dict[tuple[str, str], tuple[Ref, ...]] = {}
        self._index = Indexes()
        self._health: dict[str, Health] = {}
        self._claims: dict[tuple[str, str], Held] = {}
        self._claimed: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)  # hardware → slots that hold it
        self._lists: dict[str, Listing] = {name: Listing(name) for name in self._resources}
        self._ready: set[str] = set()
        self.broken: dict[str, str] = {}
        """Resources whose backend failed on a device of theirs, and how it did last."""

    # --- what goes in ---

    def update(self, backend: str, units: Mapping[str, Sequence[Device]]) -> None:
        """These units of a backend were looked at and hold exactly these devices now."""
        moved: set[Ref] = set()
        for unit, devices in units.items():
            moved |= self._replace_unit(backend, unit, devices)
        self._settle(moved)

    def set_health(self, changes: Mapping[str, Health]) -> None:
        """The health of hardware changed."""
        touched: set[Ref] = set()
        for hardware, health in changes.items():
            if health.state is State.HEALTHY:
                self._health.pop(hardware, None)
            else:
                self._health[hardware] = health
            touched.update(self._index.minded.get(hardware, ()))
        for ref in touched:
            self._write_slots(self._found[ref])

    def claim(self, held: Iterable[Held]) -> None:
        """Pods hold these from now on, or hold them with other hardware than was known."""
        moved: set[Ref] = set()
        for claim in held:
            before = self._claims.get(claim.slot)
            if before == claim:
                continue
            if before is not None:
                self._forget(before)
                moved |= self._concerned(before)
            self._claims[claim.slot] = claim
            for hardware in claim.hardware:
                self._claimed[hardware].add(claim.slot)
            self._lists.setdefault(claim.resource, Listing(claim.resource)).claims[claim.id] = claim
            if not self._is_placed(claim):
                moved |= self._concerned(claim)
            self._write_slot(claim.slot)
        self._settle(moved)

    def unclaim(self, ended: Iterable[Held]) -> None:
        """Nobody holds these any more."""
        moved: set[Ref] = set()
        for claim in ended:
            if (known := self._claims.pop(claim.slot, None)) is None:
                continue
            self._forget(known)
            del self._lists[claim.resource].claims[claim.id]
            moved |= self._concerned(known)
            self._write_slot(claim.slot)
        self._settle(moved)

    def ready(self, backend: str) -> None:
        """The backend has had its first scan, or its time for it is up: its resources may be listed."""
        if backend not in self._ready:
            self._ready.add(backend)
            for name, listing in self._lists.items():
                if self._backend_of(name) == backend:
                    listing.touch()

    def touch(self, resource: str) -> None:
        """Have this list sent again although nothing changed (it makes the kubelet write its checkpoint: A3)."""
        if (listing := self._lists.get(resource)) is not None:
            listing.touch()

    # --- what comes out ---

    def names(self) -> list[str]:
        """The resources to serve: the configured ones, and those retiring because a pod still holds of them."""
        return list(self._lists)

    def take(self) -> list[Snapshot]:
        """The snapshots of the resources that changed since the last call, those that may be listed at all."""
        snapshots = []
        for name, listing in list(self._lists.items()):
            if listing.dirty and self._is_ready(name):
                snapshots.append(listing.snapshot())
            if name not in self._resources and not listing.slots:
                del self._lists[name]  # retired: its last claim has ended
        return snapshots

    def slot(self, resource: str, device_id: str) -> Slot | None:
        """One slot as it is now."""
        listing = self._lists.get(resource)
        return listing.slots.get(device_id) if listing else None

    def slots(self, resource: str) -> Mapping[str, Slot]:
        """All slots of a resource as they are now."""
        return self._lists[resource].slots

    def omitted(self, resource: str) -> int:
        """How many unclaimed slots the last snapshot left out, to pass the kubelet's message limit."""
        listing = self._lists.get(resource)
        return listing.omitted if listing else 0

    def resource(self, name: str) -> Resource[Any] | None:
        """The configured resource of that name; None while it retires."""
        return self._resources.get(name)

    def unclaimed(self) -> list[Unclaimed]:
        """The devices that no resource has, each with the reasons."""
        return [
            Unclaimed(found.device, ref[0], "; ".join(found.lost + found.refused) or _homeless(found.device))
            for ref, found in sorted(self._found.items())
            if found.placed is None
        ]

    # --- devices come and go ---

    def _replace_unit(self, backend: str, unit: str, devices: Sequence[Device]) -> set[Ref]:
        """Swap a unit's devices; the refs whose place must be found anew."""
        moved: set[Ref] = set()
        fresh = {(backend, unit, device.resource or "", device.key): device for device in devices}
        for ref in self._units.pop((backend, unit), ()):
            if fresh.get(ref) != self._found[ref].device:
                moved |= self._remove(ref)
        for ref, device in fresh.items():
            if ref not in self._found:
                self._add(ref, device)
                moved.add(ref)
        if fresh:
            self._units[backend, unit] = tuple(fresh)
        return moved

    def _add(self, ref: Ref, device: Device) -> None:
        candidates, refused = [], []
        for name, resource in self._resources.items():
            if resource.spec.backend != ref[0] or device.resource not in (None, name):
                continue  # another's, and nothing to be said about
            try:
                why = resource.refuses(device)
                ids = () if why is not None else _checked_ids(self._backends[ref[0]].ids(resource, device))
            except Exception as error:  # noqa: BLE001  # one backend's nonsense must not stop the lists of all
                why = self.broken[name] = f"its IDs cannot be told: {error!r}"
            if why is None:
                candidates.append(Candidate(name, self._order[name], ids))
            else:
                refused.append(f"{name} does not take it: {why}")
        found = self._found[ref] = Found(ref, device, tuple(candidates), tuple(refused))
        self._index.add(found)

    def _remove(self, ref: Ref) -> set[Ref]:
        """Forget a device; the refs that may now have what it had."""
        found = self._found.pop(ref)
        rivals = self._index.remove(found)
        self._withdraw(found)
        return rivals

    # --- who gets what ---

    def _concerned(self, claim: Held) -> set[Ref]:
        refs = set(self._index.wanted[claim.resource].get(claim.id, ()))
        for hardware in claim.hardware:
            refs.update(self._index.owned.get(hardware, ()))
        return refs

    def _rivals(self, refs: Iterable[Ref]) -> set[Ref]:
        """These and all that share hardware or IDs with them, directly or through others."""
        todo, connected = list(refs), set()
        while todo:
            ref = todo.pop()
            if ref in connected or ref not in self._found:
                continue
            connected.add(ref)
            todo.extend(self._index.beside(self._found[ref]))
        return connected

    def _settle(self, refs: set[Ref]) -> None:
        """Find a place for these devices and for all that compete with them."""
        if not refs:
            return
        rivals = {ref: self._found[ref] for ref in sorted(self._rivals(refs))}
        outcome = assign(
            {ref: (found.device, found.candidates) for ref, found in rivals.items()}, self._claims, self._claimed
        )
        changed = [
            (found, place) for ref, found in rivals.items() if (place := outcome.placed.get(ref)) != found.placed
        ]
        for found, _ in changed:
            self._withdraw(found)
        for found, place in changed:
            found.placed = place
            if place is not None:
                self._lists[place.resource].owners.update(dict.fromkeys(place.ids, found.ref))
                self._write_slots(found)
        for ref, found in rivals.items():
            found.lost = outcome.rejected.get(ref, ())

    def _withdraw(self, found: Found) -> None:
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

    # --- slots ---

    def _write_slots(self, found: Found) -> None:
        """Write all slots of a placed device; they change together."""
        if (place := found.placed) is None:
            return
        device, health, listing = found.device, self._health_of(found.device), self._lists[place.resource]
        held = [claim for i in place.ids if (claim := listing.claims.get(i))] if listing.claims else ()
        replaced = {claim.id: _replaced(claim, device) for claim in held if not _is_same(claim, device)}
        for device_id, why in replaced.items():
            listing.put(Slot(device_id, device, why))
        listing.put_device([i for i in place.ids if i not in replaced] if replaced else place.ids, device, health)

    def _write_slot(self, slot: tuple[str, str]) -> None:
        """Write one slot from what is known: its device, else its claim's tombstone, else nothing."""
        resource, device_id = slot
        listing = self._lists[resource]
        claim = listing.claims.get(device_id)
        if (ref := listing.owners.get(device_id)) is not None:
            device = self._found[ref].device
            health = self._health_of(device) if claim is None or _is_same(claim, device) else _replaced(claim, device)
            listing.put(Slot(device_id, device, health))
        elif claim is not None:
            listing.put(Slot(device_id, None, self._tombstone(claim)))
        else:
            listing.drop([device_id])

    def _health_of(self, device: Device) -> Health:
        """The worst of its own hardware and of what it depends on."""
        if not self._health:
            return HEALTHY
        complaints = [h for name in sorted(device.hardware | device.depends) if (h := self._health.get(name))]
        return next((h for h in complaints if h.state is State.UNHEALTHY), complaints[0] if complaints else HEALTHY)

    def _tombstone(self, claim: Held) -> Health:
        if claim.resource not in self._resources:
            return Health(State.UNHEALTHY, "retired", f"{claim.resource} is no longer configured")
        return Health(State.UNHEALTHY, "gone", "the device is gone; a pod still holds it")

    # --- small things ---

    def _is_placed(self, claim: Held) -> bool:
        """Is the claimed hardware where it belongs already, and nobody else after its ID?

        Every Allocate asks, and nothing is to be decided then.
        """
        ref = self._lists[claim.resource].owners.get(claim.id)
        return (
            ref is not None
            and claim.hardware <= self._found[ref].device.hardware
            and self._index.wanted[claim.resource][claim.id] == (ref,)
        )

    def _forget(self, claim: Held) -> None:
        for hardware in claim.hardware:
            self._claimed[hardware].discard(claim.slot)
            if not self._claimed[hardware]:
                del self._claimed[hardware]

    def _backend_of(self, resource: str) -> str | None:
        configured = self._resources.get(resource)
        return configured.spec.backend if configured else None

    def _is_ready(self, resource: str) -> bool:
        backend = self._backend_of(resource)
        return backend is None or backend in self._ready


def _checked_ids(ids: Iterable[Any]) -> tuple[str, ...]:
    """A backend's IDs, each once.

    Raises:
        ValueError: one of them cannot be sent to a kubelet.
    """
    unique = tuple(dict.fromkeys(ids))
    if wrong := [device_id for device_id in unique if not (isinstance(device_id, str) and device_id)]:
        raise ValueError(f"{wrong[0]!r} is no ID")
    "".join(unique).encode()  # a file name may have bytes that are no text
    return unique


def _is_same(claim: Held, device: Device) -> bool:
    """Is this the card that the pod was given?"""
    if claim.identity and claim.identity != device.identity:
        return False
    return not claim.hardware or not claim.hardware.isdisjoint(device.hardware)


def _homeless(device: Device) -> str:
    return f"it was made for {device.resource}, which is not configured for its backend"


def _replaced(claim: Held, device: Device) -> Health:
    was, now = claim.identity, device.identity
    if was == now:
        was, now = ", ".join(sorted(claim.hardware)), ", ".join(sorted(device.hardware))
    return Health(State.UNHEALTHY, "replaced", f"another device ({now}) is where the pod's ({was}) was")
