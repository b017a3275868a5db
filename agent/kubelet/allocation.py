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
    ) -> None:
        self._inventory = inventory
        self._backends = backends
        self._workers = workers
        self._record = record

    async def allocate(self, name: str, ids: Sequence[str], told: Callable[[str], bool]) -> ContainerEdits:
        """Claim these IDs and say what the container gets.

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
        for grant in grants:  # what happened while we waited?
            self._grant(name, grant.id, told)
        try:
            return backend.edits(resource, grants)
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
            raise AllocationRefused(f"Device {device_id} of {name} cannot be used now: {reason}. Create the pod again.")
        return Grant(device_id, slot.device)

    async def _make_ready(self, backend: Backend[Any], resource: Resource[Any], grants: Sequence[Grant]) -> None:
        """Run the backend's `claim` in a thread, with a deadline."""
        names = ", ".join(grant.id for grant in grants)
        try:
            async with asyncio.timeout(CLAIM_DEADLINE):
                await self._workers[resource.spec.backend].start(partial(backend.claim, resource, grants))
        except AllocationRefused:
            raise
        except (TimeoutError, NoWorkerError) as error:
            log.warning(
                "claim-hangs", backend=resource.spec.backend, resource=resource.name, ids=names, error=str(error)
            )
            raise AllocationRefused(
                f"{names} of {resource.name} could not be made ready within {CLAIM_DEADLINE:g} s. Create the pod again; "
                "if it happens again, this node's administrator must look at the device."
            ) from None
        except Exception as error:
            log.exception("backend-failed", backend=resource.spec.backend, call="claim", resource=resource.name)
            raise AllocationRefused(_broken(resource, grants, error)) from error


def _held(resource: Resource[Any], grant: Grant) -> Held:
    return Held(resource.name, grant.id, resource.spec.backend, grant.device.hardware, grant.device.identity)


def _broken(resource: Resource[Any], grants: Sequence[Grant], error: Exception) -> str:
    names = ", ".join(grant.id for grant in grants)
    return (
        f"{names} of {resource.name} could not be prepared: the backend {resource.spec.backend} failed ({error}). "
        "This node's administrator finds the details in Fairlead's log."
    )
