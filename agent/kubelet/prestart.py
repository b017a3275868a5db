"""PreStartContainer: looks at a container's devices before each of its starts, and resets them where that is asked for.

A refusal keeps the container from starting; the kubelet shows the sentence and asks again later (kubelet contract: A4).
Hardware that an operator has drained is no reason to refuse: drained means no new pods, and this one has it already.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final, Protocol

import structlog

from agent.claims.ledger import Ledger
from agent.discovery import backend_answers
from agent.hardware.jobs import Job, Jobs, Kind
from agent.inventory.decision import condition
from agent.inventory.inventory import Inventory
from agent.kubelet.plugin import PreStart
from agent.model import REPLACED, Health, SlotKey, State
from agent.runtime.errors import brief, brief_list
from agent.runtime.workers import in_slices
from backends.base import AllocationRefused, Backend, Device, Grant, Resource

PRE_START_DEADLINE: Final = 27.0
"""Seconds that all of it may take; the kubelet waits 30 (A4), and then nobody reads our sentence."""

_SAID: Final = 10_000  # slots whose refusals are remembered; those of others may be logged twice
_AGAIN: Final = "The start is tried again by itself"
_CHECK: Final = Kind("probe", "could not be looked at before the container's start", _AGAIN, PRE_START_DEADLINE)
_RESET: Final = Kind("prepare", "could not be reset before the container's start", _AGAIN, PRE_START_DEADLINE, True)

log = structlog.get_logger()


class Node(Protocol):
    """The part of the daemon that knows the health of hardware."""

    def to_holder(self, hardware: str, *, reset: bool) -> Health:
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
        node: Node,
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
            AllocationRefused: it is gone, or another one is in its place.
        """
        found = self._inventory.slot(*slot)
        if found is None or found.device is None:
            raise _refusal(slot, "is not on this node: it is gone", "is back")
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
        health = condition(device, lambda name: unseen.get(name) or self._node.to_holder(name, reset=name in resets))
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
