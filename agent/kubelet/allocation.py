"""Answers a kubelet's calls about a container: which IDs it should ask for, what they bring, and whether it may start.

Allocate: IDs are sorted and taken once each (they come in random order: A4), every one must be healthy now and in the
last list sent (A7.1), the claim is recorded before anything is handed out, and only then the backend acts. What it
did to the hardware (a driver bound, a node made) is looked at before the container is told.

GetPreferredAllocation runs in the kubelet's sync loop, and an error fails the pod's admission (A4): whatever goes wrong, there is
an answer. The kubelet takes of it what is free, and fills up with any devices where that is not enough.

PreStartContainer looks at a container's devices before each of its starts, and resets them where that is asked for. A refusal
keeps the container from starting; the kubelet shows the sentence and asks again later (kubelet contract: A4). Hardware that an
operator has drained is no reason to refuse: drained means no new pods, and this one has it already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

import structlog
from anyio import to_thread
from msgspec.structs import replace

from agent.cdi.on_demand import Cdi
from agent.claims.ledger import Ledger
from agent.discovery import backend_answers
from agent.discovery.backend_answers import ask
from agent.hardware.jobs import Job, Jobs, Kind, broken
from agent.inventory.inventory import Inventory
from agent.inventory.ownership import HELD_AND_GONE, condition
from agent.kubelet import wire
from agent.kubelet.wire import PreferredRequest
from agent.model import REPLACED, Health, Held, Slot, SlotKey, State
from agent.placement.affinity import Company
from agent.placement.choice import Admission, choose
from agent.runtime.errors import brief, brief_list
from agent.runtime.workers import in_slices
from backends.base import AllocationRefused, Backend, ContainerEdits, Device, Grant, Resource

CLAIM_DEADLINE: Final = 10.0
"""Seconds a backend may take to make hardware ready; the kubelet's sync loop waits meanwhile (A4)."""

_FAILED: Final = "could not be made ready"
_AGAIN: Final = "The kubelet tries again by itself"

log = structlog.get_logger()

Holder = Callable[[Sequence[SlotKey]], Awaitable[tuple[SlotKey, str] | None]]
"""Finds out which of these claimed slots a pod has for certain, and which pod, in words."""

Prefer = Callable[[PreferredRequest], Awaitable[tuple[str, ...]]]
"""The IDs to give to a container, in valid form whatever the request is; raises nothing."""

Allocate = Callable[[str, Sequence[str], Callable[[str], bool]], Awaitable[wire.Encoded]]
"""Gives these IDs of a resource to a container, as an AllocateResponse; asks whether the kubelet was told of an ID.

Raises AllocationRefused with a sentence for the pod's owner.
"""

PreStart = Callable[[str, Sequence[str]], Awaitable[None]]
"""Makes sure that a container may start with these IDs of a resource.

Raises AllocationRefused with a sentence for the pod's owner.
"""

PRE_START_DEADLINE: Final = 27.0
"""Seconds that all of it may take; the kubelet waits 30 (A4), and then does not read our sentence."""

_SAID: Final = 10_000  # slots whose refusals are remembered; those of others may be logged twice
_START_AGAIN: Final = "The start is tried again by itself"
_CHECK: Final = Kind("probe", "could not be looked at before the container's start", _START_AGAIN, PRE_START_DEADLINE)
_RESET: Final = Kind(
    "prepare", "could not be reset before the container's start", _START_AGAIN, PRE_START_DEADLINE, True
)


class Allocator:
    """Gives devices to containers."""

    def __init__(
        self,
        inventory: Inventory,
        backends: Mapping[str, Backend[Any]],
        jobs: Jobs,
        record: Callable[[Sequence[Held]], Awaitable[None]],
        *,
        claim_deadline: float = CLAIM_DEADLINE,
        cdi: Cdi | None = None,
        admission: Admission | None = None,
        holder: Holder | None = None,
        being_given: set[SlotKey] | None = None,
    ) -> None:
        """Prepare.

        Args:
            inventory: what there is, and how it is.
            backends: by their kinds.
            jobs: makes backends act.
            record: told what is about to be given; what it cannot write down refuses nothing.
            claim_deadline: seconds until the hardware is ready.
            cdi: where resources hand out by CDI.
            admission: remembers what is given, for the choice among the container's other resources.
            holder: finds who has what is claimed.
            being_given: has what is for one pod while that is being given.
        """
        self._inventory = inventory
        self._backends = backends
        self._jobs = jobs
        self._record = record
        self._cdi = cdi
        self._admission = admission or Admission()
        self._holder = holder
        self._being_given = set[SlotKey]() if being_given is None else being_given
        self._make_ready = Kind("claim", _FAILED, "Create the pod again", claim_deadline)
        self._make_ready_again = Kind("claim", _FAILED, _AGAIN, 3 * claim_deadline, waits_for_thread=True)

    async def allocate(self, name: str, ids: Sequence[str], told: Callable[[str], bool]) -> wire.Encoded:
        """Claim these IDs and say what the container gets, as an AllocateResponse.

        Args:
            name: the resource.
            ids: as the kubelet sent them.
            told: whether the kubelet was told of this ID.

        Raises:
            AllocationRefused: nothing is handed out; the sentence is for the pod's owner.
        """
        so_far = self._admission.take(name)
        self._configured(name)
        grants = await in_slices(self._grant(name, device_id, told) for device_id in sorted(set(ids)))
        slots = {(name, grant.id) for grant in grants if self._inventory.is_for_one((name, grant.id))}
        # the kubelet asks for one container of a pod after the other: what overlaps is for two pods
        if twice := slots & self._being_given:
            raise AllocationRefused(_in_use(min(twice), "another pod, which is being given it at this moment,"))
        self._being_given |= slots
        try:
            claims = self._inventory.claims(name)
            if self._holder and (claimed := sorted(slot for slot in slots if slot[1] in claims)):
                if (found := await self._holder(claimed)) is not None:
                    raise AllocationRefused(_in_use(*found))
                grants = await in_slices(self._grant(name, grant.id, told) for grant in grants)
            given = await self._give(name, grants, told)
        finally:
            self._being_given -= slots
        self._admission.given({**so_far, name: [grant.device for grant in given[1]]})
        return given[0]

    async def _give(
        self, name: str, grants: Sequence[Grant], told: Callable[[str], bool]
    ) -> tuple[wire.Encoded, Sequence[Grant]]:
        """Record the claims, make the hardware ready, and say what the container gets, with the grants as they are then."""
        kind = self._configured(name).spec.backend
        given = await in_slices(Held.of(name, it.id, kind, it.device) for it in grants)
        await self._record(given)
        resource = await self.make_ready(name, grants, given)
        grants = await self._all_still(name, grants, told)
        edits = self.edits(resource, grants)
        with _blaming("edits", resource, grants):
            by_name = resource.spec.edits != "inline" or edits.cdi_devices or edits.annotations
            if self._cdi is not None and by_name:
                edits = await self._cdi.answer(resource, grants, edits)
                # a list may have gone out while the specification was written
                await self._all_still(name, grants, told)
            if self._configured(name) != resource:
                raise AllocationRefused(f"{name} was reconfigured a moment ago. Create the pod again.")
            return wire.encode_allocate([edits]), grants

    async def make_ready(
        self, name: str, grants: Sequence[Grant], given: Sequence[Held], *, is_asked_again: bool = False
    ) -> Resource[Any]:
        """Make the hardware of recorded claims ready, and look at it; the resource as it is then.

        Where the kubelet asks again after a refusal, it also asks for many pods at once.

        Raises:
            AllocationRefused: with a sentence for the pod's owner.
        """
        ready = None
        while (resource := self._configured(name)) != ready:  # a reload may have changed it while we waited
            if any(held.backend != resource.spec.backend for held in given):
                raise AllocationRefused(f"{name} is of other devices since a moment ago. Create the pod again.")
            backend, turns = self._backends[resource.spec.backend], self._jobs.turns
            with _blaming("needs_claim", resource, grants):
                needs_claim = backend_answers.needs_claim(backend, resource)
            ready = resource
            if not needs_claim and not turns.busy:
                continue
            things = frozenset[Hashable]().union(*(held.things for held in given))
            if needs_claim or turns.is_taken(things):
                kind = self._make_ready_again if is_asked_again else self._make_ready
                async with self._jobs.job(kind, resource, [grant.id for grant in grants]) as job:
                    async with job.turn(things) as turn:
                        if needs_claim:
                            self._refuse_exchanged(name, grants)  # while we waited for our turn
                            await job.run(turn, partial(backend.claim, resource, grants))
                    await job.look(grant.device for grant in grants)
        return ready

    def edits(self, resource: Resource[Any], grants: Sequence[Grant]) -> ContainerEdits:
        """What a container gets with these grants.

        Raises:
            AllocationRefused: with a sentence for the pod's owner.
        """
        with _blaming("edits", resource, grants):
            backend = self._backends[resource.spec.backend]
            return backend_answers.edits(ask(partial(backend.edits, resource, grants)))

    def _configured(self, name: str) -> Resource[Any]:
        if (resource := self._inventory.resource(name)) is None:
            raise AllocationRefused(f"{name} is no longer offered on this node; its configuration was removed.")
        return resource

    def _grant(self, name: str, device_id: str, told: Callable[[str], bool], before: Device | None = None) -> Grant:
        """The grant as it is now; `claim` may have changed a device that was granted before (its driver, its nodes)."""
        slot = self._inventory.slot(name, device_id)
        if slot is None or not told(device_id):
            raise _gone(name, device_id)
        if slot.device is None or not slot.health.offered:
            raise AllocationRefused(unfit(name, slot))
        if (why := self._inventory.why_not_again((name, device_id))) is not None:
            raise AllocationRefused(unfit(name, replace(slot, health=why)))
        if before is not None:
            _refuse_another(name, device_id, before, slot.device)
        return Grant(device_id, slot.device)

    async def _all_still(self, name: str, before: Sequence[Grant], told: Callable[[str], bool]) -> list[Grant]:
        """The grants as they are after we waited; in the step that goes on from here, every ID is in the last list (A7.1)."""
        now = await in_slices(self._grant(name, it.id, told, it.device) for it in before)
        for grant in now:
            if not told(grant.id):
                raise _gone(name, grant.id)
        return now

    def _refuse_exchanged(self, name: str, grants: Sequence[Grant]) -> None:
        """Refuse where a device was exchanged for another; its health is looked at after `claim`."""
        for grant in grants:
            slot = self._inventory.slot(name, grant.id)
            if slot is not None and slot.device is not None:
                _refuse_another(name, grant.id, grant.device, slot.device)


@contextmanager
def _blaming(call: str, resource: Resource[Any], grants: Sequence[Grant]) -> Iterator[None]:
    """Turn what a backend's call on the event loop raises into a refusal with a sentence for the pod's owner."""
    try:
        yield
    except AllocationRefused:
        raise
    except Exception as error:
        log.exception("backend-failed", backend=resource.spec.backend, call=call, resource=resource.name)
        named = f"{', '.join(grant.id for grant in grants)} of {resource.name}"
        raise AllocationRefused(broken(named, _FAILED, resource.spec.backend, error)) from error


def _gone(name: str, device_id: str) -> AllocationRefused:
    return AllocationRefused(
        f"{name} has no device {brief(device_id)} on this node at the moment: it is gone, or it has come back "
        "only just now. Create the pod again."
    )


def _refuse_another(name: str, device_id: str, before: Device, now: Device) -> None:
    if (now.hardware, now.identity) != (before.hardware, before.identity):
        raise AllocationRefused(
            f"{device_id} of {name} was exchanged for another device while it was made ready. Create the pod again."
        )


def _in_use(slot: SlotKey, who: str) -> str:
    return (
        f"Device {brief(slot[1])} of {slot[0]} is in use: {who} has it, and the kubelet asks for it a second time. "
        "Create the pod again."
    )


def unfit(name: str, slot: Slot) -> str:
    """Why a slot that is Unhealthy is not handed out, for the pod's owner."""
    reason = slot.health.message or slot.health.reason
    return f"Device {slot.id} of {name} cannot be used now: {reason.rstrip('.')}. Create the pod again."


# --- GetPreferredAllocation ---


def plain(request: PreferredRequest) -> tuple[str, ...]:
    """Those that must be included, then the first ones: for resources whose devices are all alike."""
    return choose({}, (), "spread", request.available, request.must_include, request.size)


class Preferences:
    """Chooses for all resources that have something to choose."""

    def __init__(
        self, inventory: Inventory, backends: Mapping[str, Backend[Any]], admission: Admission | None = None
    ) -> None:
        """Prepare; `backends` by their kinds, `admission` knows what the container under way has of other resources."""
        self._inventory = inventory
        self._backends = backends
        self._admission = admission or Admission()

    def of(self, name: str) -> Prefer | None:
        """How a resource chooses; None where it does not matter which devices a pod gets."""
        resource = self._inventory.resource(name)
        if resource is None:
            return None
        try:
            backend = self._backends[resource.spec.backend]
            matters = ask(lambda: bool(backend.prefers(resource)))
        except Exception:
            log.exception("backend-failed", backend=resource.spec.backend, call="prefers", resource=name)
            return None
        return (lambda request: self._choose(name, request)) if matters else None

    async def _choose(self, name: str, request: PreferredRequest) -> tuple[str, ...]:
        """Choose in a thread: 1,000 devices take up to 50 ms."""
        resource = self._inventory.resource(name)
        if resource is None:
            return plain(request)  # it retires
        slots, links = dict(self._inventory.slots(name)), self._inventory.links(resource.spec.backend)
        asked = resource.spec.placement, request.available, request.must_include, request.size
        company = self._company(name, self._backends[resource.spec.backend].company)
        try:
            # not asyncio's threads: their module is loaded with the first one, which takes a descriptor
            return await to_thread.run_sync(choose, slots, links, *asked, company)
        except Exception:
            log.exception("placement-failed", resource=name, size=request.size, then="giving the first ones")
            return plain(request)

    def _company(self, name: str, usual: Set[str]) -> list[Company]:
        """What the container has of other resources; and where it has none of the usual kinds, what is free of these."""
        given = self._admission.so_far(name)
        company = [Company(devices) for devices in given.values()]
        kinds = {other: self._inventory.kind(other) for other in self._inventory.names() if other != name}
        if usual and not any(kinds.get(other) in usual for other in given):
            free = [device for other, kind in kinds.items() if kind in usual for device in self._free(other)]
            company.append(Company(free, given=False))
        return company

    def _free(self, name: str) -> list[Device]:
        """The devices of which a pod could get a slot now."""
        held = self._inventory.claims(name)
        slots = (slot for device_id, slot in self._inventory.slots(name).items() if device_id not in held)
        free = {(it.unit, it.key): it for slot in slots if (it := slot.device) is not None and slot.health.offered}
        return list(free.values())


# --- PreStartContainer ---


class HealthSource(Protocol):
    """The part of the daemon that knows the health of hardware."""

    def health_for_pod(self, hardware: str, *, reset: bool) -> Health:
        """The health of this hardware for the pod that has it, or what it would be after a reset of ours."""

    def was_reset(self, hardware: Set[str]) -> None:
        """Note that we have reset this hardware."""


class Starter:
    """Decides whether containers may start."""

    def __init__(
        self,
        inventory: Inventory,
        ledger: Ledger,
        backends: Mapping[str, Backend[Any]],
        jobs: Jobs,
        node: HealthSource,
        two_pods: Callable[[Iterable[SlotKey]], Awaitable[Collection[SlotKey]]] | None = None,
    ) -> None:
        """Prepare.

        Args:
            inventory: what there is.
            ledger: who holds what.
            backends: by their kinds.
            jobs: makes backends act.
            node: knows how hardware is to pods, and is told what has been reset.
            two_pods: finds out which of these slots two pods hold.
        """
        self._inventory = inventory
        self._ledger = ledger
        self._backends = backends
        self._jobs = jobs
        self._node = node
        self._two_pods = two_pods
        self._said: dict[SlotKey, str] = {}

    def of(self, name: str) -> PreStart | None:
        """The check before each start of a container; None where the resource asks for none."""
        resource = self._inventory.resource(name)
        return None if resource is None or resource.spec.pre_start == "none" else self.start

    async def start(self, name: str, ids: Sequence[str], *, resets: bool = False) -> None:
        """Look at the devices, and reset them where that is asked for, before a container with these IDs starts.

        `resets` asks for it where the resource does not.

        Raises:
            AllocationRefused: it must not; the sentence is for the pod's owner.
        """
        if (resource := self._inventory.resource(name)) is None:
            return  # the resource retires: its configuration is gone, and its pods may go on
        slots = [(name, device_id) for device_id in sorted(set(ids))]
        try:
            await self._make_sure(resource, slots, resets=resets or resource.spec.pre_start == "reset")
        except AllocationRefused as refusal:
            self._say(slots, refusal.sentence)
            raise
        self._say(slots, "")

    async def _make_sure(self, resource: Resource[Any], slots: Sequence[SlotKey], *, resets: bool) -> None:
        if self._two_pods is not None:
            for slot in await self._two_pods(slots):
                if self._inventory.is_for_one(slot):  # which of the two is to start, the kubelet does not say
                    raise _refusal(
                        slot, "is held by two pods, because the kubelet gave it out twice", "is one pod's alone"
                    )
        if resets and type(self._backends[resource.spec.backend]).prepare is Backend.prepare:
            raise AllocationRefused(
                f"{', '.join(_ids(slots))} of {resource.name} cannot be reset: the backend {resource.spec.backend!r} has no way "
                "to. Ask for it without a reset."
            )
        async with self._jobs.job(_RESET if resets else _CHECK, resource, _ids(slots)) as job:
            unseen = await self._look(job, resource, slots)
            if resets:
                await self._reset(job, resource, slots, unseen)
                unseen = await self._look(job, resource, slots)
            await in_slices(self._check(slot, unseen) for slot in slots)

    async def _look(self, job: Job, resource: Resource[Any], slots: Sequence[SlotKey]) -> Mapping[str, Health]:
        """Look at the devices and at their parts; returns the hardware of parts that cannot be looked at.

        Raises:
            AllocationRefused: a device is gone.
            LookError: one cannot be looked at.
        """
        await job.look(await in_slices(self._there(slot) for slot in slots))
        parts = self._parts(resource.spec.backend, await in_slices(self._there(slot) for slot in slots))
        problems = await job.look_as_far_as_possible(sorted(parts))
        return {h: Health(State.UNHEALTHY, "unseen", why) for unit, why in problems.items() for h in parts[unit]}

    def _parts(self, kind: str, devices: Sequence[Device]) -> Mapping[str, Set[str]]:
        """The backend's units where the parts of these devices are found, with the hardware in each."""
        hardware = {name for device in devices for part in device.parts for name in part}
        units = defaultdict[str, set[str]](set)
        for found in self._inventory.on(hardware):
            if found.backend == kind and not found.device.parts:
                units[found.device.unit] |= found.device.hardware
        return units

    def _there(self, slot: SlotKey) -> Device:
        """The device that the pod was given.

        Raises:
            AllocationRefused: it is gone, it cannot be used now, or another one is in its place.
        """
        found = self._inventory.slot(*slot)
        if found is None or found.health.reason == HELD_AND_GONE.reason:
            raise _refusal(slot, "is not on this node: it is gone", "is back")
        if found.device is None:
            raise _refusal(slot, f"cannot be used now: {found.health.message}", "can be used")
        if found.health.reason in REPLACED:
            raise _refusal(slot, f"is not what the pod was given: {found.health.message}", "is back")
        return found.device

    def _check(self, slot: SlotKey, unseen: Mapping[str, Health], *, before_reset: bool = False) -> Device:
        """The device, if it is fit for use, or if a reset may make it fit.

        Raises:
            AllocationRefused: it is not.
        """
        device = self._there(slot)
        resets = device.hardware if before_reset else frozenset[str]()
        health = condition(
            device, lambda name: unseen.get(name) or self._node.health_for_pod(name, reset=name in resets)
        )
        if not health.offered:
            raise _refusal(slot, f"is unhealthy: {health.message or health.reason}", "is healthy again")
        return device

    async def _reset(
        self, job: Job, resource: Resource[Any], slots: Sequence[SlotKey], unseen: Mapping[str, Health]
    ) -> None:
        """Reset the hardware, which this pod must have to itself."""
        hardware = frozenset(h for slot in slots for h in self._check(slot, unseen, before_reset=True).hardware)
        async with job.turn(frozenset[Hashable]((*hardware, *slots))) as turn:
            grants = [Grant(slot[1], self._check(slot, unseen, before_reset=True)) for slot in slots]
            self._refuse_to_disturb(slots, hardware)
            call = partial(_prepare, self._backends[resource.spec.backend], resource, grants)
            done = await job.run(turn, call)
        log.info("hardware-reset", resource=resource.name, ids=_ids(slots), hardware=sorted(done))
        self._node.was_reset(done)

    def _refuse_to_disturb(self, slots: Sequence[SlotKey], hardware: Set[str]) -> None:
        """Refuse where another claim has some of this hardware, or a device that depends on it."""
        for held in self._ledger.held():
            other = self._inventory.slot(*held.slot)
            depends = other.device.depends if other and other.device else frozenset[str]()
            if held.slot not in slots and not hardware.isdisjoint(held.hardware | depends):
                raise AllocationRefused(
                    f"{', '.join(_ids(slots))} of {slots[0][0]} cannot be reset: it would disturb {held.id} of "
                    f"{held.resource}, which is on the same hardware and in use. The container starts once that is over."
                )

    def _say(self, slots: Sequence[SlotKey], refusal: str) -> None:
        """Log once why a container does not start, however often that is tried, and log when it starts."""
        if all(self._said.get(slot, "") == refusal for slot in slots):
            return
        if len(self._said) > _SAID:
            self._said.clear()
        for slot in slots:
            self._said[slot] = refusal
            if not refusal:
                del self._said[slot]
        if refusal:
            log.warning("start-refused", resource=slots[0][0], ids=brief_list(_ids(slots)), reason=refusal)
        else:
            log.info("start-allowed", resource=slots[0][0], ids=_ids(slots))


def _ids(slots: Sequence[SlotKey]) -> list[str]:
    return [device_id for _, device_id in slots]


def _refusal(slot: SlotKey, what: str, until: str) -> AllocationRefused:
    return AllocationRefused(
        f"Device {brief(slot[1])} of {slot[0]} {what.rstrip('.')}. The container starts once it {until}; "
        "a new pod may get another one."
    )


def _prepare(backend: Backend[Any], resource: Resource[Any], grants: Sequence[Grant]) -> frozenset[str]:
    """Run `prepare` to its end, in the thread: it may be a generator.

    Raises:
        NonsenseError: it returned nonsense.
    """
    return backend_answers.reset(backend.prepare(resource, grants))
