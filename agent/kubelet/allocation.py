"""Allocate: from the IDs a kubelet asks for to what the container gets.

IDs are sorted and taken once each (they come in random order: A4), every one must be healthy now and in the
last list sent (A7.1), the claim is recorded before anything is handed out, and only then the backend acts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import structlog

from agent.devices.inventory import Inventory
from agent.devices.model import Held
from agent.devices.workers import NoWorkerError, Workers
from agent.kubelet import wire
from backends.base import AllocationRefused, Backend, ContainerEdits, Grant, Resource

CLAIM_DEADLINE: Final = 10.0
"""Seconds a backend may take to make hardware ready; the kubelet's sync loop waits meanwhile (A4)."""

log = structlog.get_logger()


class Allocator:
    """Gives devices to containers."""

    def __init__(
        self,
        inventory: Inventory,
        backends: Mapping[str, Backend[Any]],
        workers: Mapping[str, Workers],
        record: Callable[[Sequence[Held]], Awaitable[None]],
        claim_deadline: float = CLAIM_DEADLINE,
    ) -> None:
        """Prepare.

        Args:
            inventory: what there is, and how it is.
            backends: by their kinds, as `workers`.
            workers: where `claim` runs.
            record: told what is about to be given; what it cannot write down refuses nothing.
            claim_deadline: seconds for `claim`.
        """
        self._inventory = inventory
        self._backends = backends
        self._workers = workers
        self._record = record
        self._claim_deadline = claim_deadline

    async def allocate(self, name: str, ids: Sequence[str], told: Callable[[str], bool]) -> wire.Encoded:
        """Claim these IDs and say what the container gets, as an AllocateResponse.

        Args:
            name: the resource.
            ids: as the kubelet sent them.
            told: was the kubelet told of this ID?

        Raises:
            AllocationRefused: nothing is handed out; the sentence is for the pod's owner.
        """
        resource = self._inventory.resource(name)
        if resource is None:
            raise AllocationRefused(f"{name} is no longer offered on this node; its configuration was removed.")
        grants = [self._grant(name, device_id, told) for device_id in sorted(set(ids))]
        backend = self._backends[resource.spec.backend]
        await self._record([_held(resource, grant) for grant in grants])
        if backend.needs_claim(resource):
            await self._make_ready(backend, resource, grants)
        grants = [self._still(name, grant, told) for grant in grants]
        try:
            edits = backend.edits(resource, grants)
            if not isinstance(edits, ContainerEdits):
                raise TypeError(f"edits() returned {type(edits).__name__}")
            return wire.encode_allocate([edits])
        except AllocationRefused:
            raise
        except Exception as error:
            log.exception("backend-failed", backend=resource.spec.backend, call="edits", resource=name)
            raise AllocationRefused(_broken(resource, grants, error)) from error

    def _grant(self, name: str, device_id: str, told: Callable[[str], bool]) -> Grant:
        slot = self._inventory.slot(name, device_id)
        if slot is None or not told(device_id):
            raise AllocationRefused(
                f"{name} has no device {device_id} on this node at the moment: it is gone, or it is back and "
                "the kubelet has not been told yet. Create the pod again."
            )
        if slot.device is None or not slot.health.offered:
            reason = slot.health.message or slot.health.reason
            raise AllocationRefused(
                f"Device {device_id} of {name} cannot be used now: {reason.rstrip('.')}. Create the pod again."
            )
        return Grant(device_id, slot.device)

    def _still(self, name: str, before: Grant, told: Callable[[str], bool]) -> Grant:
        """The grant as it is after we waited; `claim` may have changed the device (its driver, its nodes)."""
        now = self._grant(name, before.id, told)
        if (now.device.hardware, now.device.identity) != (before.device.hardware, before.device.identity):
            raise AllocationRefused(
                f"{before.id} of {name} was exchanged for another device while it was made ready. Create the pod again."
            )
        return now

    async def _make_ready(self, backend: Backend[Any], resource: Resource[Any], grants: Sequence[Grant]) -> None:
        """Run the backend's `claim` in a thread, with a deadline."""
        try:
            async with asyncio.timeout(self._claim_deadline) as deadline:
                await self._workers[resource.spec.backend].start(partial(backend.claim, resource, grants))
        except AllocationRefused:
            raise
        except Exception as error:
            if not (deadline.expired() or isinstance(error, NoWorkerError)):
                log.exception("backend-failed", backend=resource.spec.backend, call="claim", resource=resource.name)
                raise AllocationRefused(_broken(resource, grants, error)) from error
            why = str(error) or f"not done within {self._claim_deadline:g} s"
            log.warning(
                "claim-hangs", backend=resource.spec.backend, resource=resource.name, ids=_ids(grants), reason=why
            )
            raise AllocationRefused(
                f"{_ids(grants)} of {resource.name} could not be made ready: {why}. Create the pod again; "
                "if it happens again, this node's administrator must look at the device."
            ) from None


def _held(resource: Resource[Any], grant: Grant) -> Held:
    return Held(resource.name, grant.id, resource.spec.backend, grant.device.hardware, grant.device.identity)


def _broken(resource: Resource[Any], grants: Sequence[Grant], error: Exception) -> str:
    return (
        f"{_ids(grants)} of {resource.name} could not be prepared: the backend {resource.spec.backend} failed ({error}). "
        "This node's administrator finds the details in Fairlead's log."
    )


def _ids(grants: Sequence[Grant]) -> str:
    return ", ".join(grant.id for grant in grants)
