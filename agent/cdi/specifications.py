"""Keeps the CDI specifications of all resources in step with the lists, and writes a name before a container is given it.

A device's nodes and mounts are its own, and stand in its resource's specification. Environment, annotations and what a
backend itself names by CDI are the whole request's (their values are joined from its devices), and stay in the answer. A
request whose nodes and mounts are not those of its devices together is answered inline.

An entry stays as long as a pod may have its name: a container that starts again is made from it. Only the agent that serves
the node keeps them in step; an Allocate writes what it names by itself. What cannot be written is tried again, and reported
once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import structlog
from msgspec import Struct
from msgspec.structs import replace

from agent.cdi import spec
from agent.cdi.directory import CutOffError, Devices, Directory
from agent.discovery import backend_answers
from agent.discovery.backend_answers import ask
from agent.discovery.paths import Change, DirectoryWatch
from agent.inventory.inventory import Inventory
from agent.model import Slot
from agent.runtime import pacing
from agent.runtime.errors import words
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Problems, Trouble, Troubles
from agent.runtime.workers import NoWorkerError, Workers, in_slices
from backends.base import AllocationRefused, Backend, ContainerEdits, Device, Grant, Host, Resource

WRITE_DEADLINE: Final = 10.0
"""Seconds that an Allocate waits for the disk; the kubelet's sync loop waits meanwhile (kubelet contract: A4)."""
RETRY: Final = 10.0
"""Seconds before what could not be written is tried again."""

log = structlog.get_logger()


# --- what of an answer goes by name; pure ---


class Named(Struct, frozen=True):
    """An answer that names devices of ours."""

    edits: ContainerEdits
    """What the kubelet is told."""
    devices: Mapping[str, ContainerEdits]
    """Name → what its specification must say before."""


def named(
    backend: Backend[Any], resource: Resource[Any], grants: Sequence[Grant], edits: ContainerEdits
) -> Named | None:
    """The answer for a resource with `edits = "cdi"` or `"both"`; None where nothing of it can go by CDI.

    Raises:
        Exception: whatever the backend raises.
    """
    if resource.spec.edits == "inline":
        return None
    devices = dict[str, ContainerEdits]()
    for grant in grants:
        if (found := _device(backend, resource, grant)) is None:
            return None
        devices[found[0]] = found[1]
    together = {(*it.nodes, *it.mounts) for it in devices.values()}
    if {one for it in together for one in it} != {*edits.nodes, *edits.mounts}:
        return None
    if not (devices := {name: it for name, it in devices.items() if it.nodes or it.mounts}):
        return None
    every = tuple(spec.qualified(resource.name, name) for name in devices)
    told = replace(
        edits,
        annotations={**edits.annotations, spec.annotation(resource.name): ",".join(every)},
        cdi_devices=(*edits.cdi_devices, *every),
    )
    return Named(replace(told, nodes=(), mounts=()) if resource.spec.edits == "cdi" else told, devices)


def listed(backend: Backend[Any], resource: Resource[Any], device: Device) -> tuple[str, ContainerEdits] | None:
    """What a device is in its resource's specification, by its first ID; None where only a claim can tell.

    Raises:
        Exception: whatever the backend raises.
    """
    first = first_id(backend, resource, device)
    found = _alone(backend, resource, Grant(first, device))
    return None if found is None or not (found.nodes or found.mounts) else (spec.device(first), found)


def claimed(
    backend: Backend[Any], resource: Resource[Any], grant: Grant, device: tuple[str, ContainerEdits] | None
) -> tuple[str, ContainerEdits] | None:
    """What a pod's ID is in its resource's specification; None where it goes by its device's first ID, which `device` is.

    Raises:
        Exception: whatever the backend raises.
    """
    own = _alone(backend, resource, grant)
    if own is None or not (own.nodes or own.mounts) or (device is not None and device[1] == own):
        return None
    return spec.device(grant.id), own


def first_id(backend: Backend[Any], resource: Resource[Any], device: Device) -> str:
    """The ID that names a device, however many it has."""
    return ask(lambda: backend_answers.ids(backend.ids(resource, device)))[0]


def _device(backend: Backend[Any], resource: Resource[Any], grant: Grant) -> tuple[str, ContainerEdits] | None:
    """The name of a grant, and its edits: that of the device, unless its IDs bring different edits."""
    own = _alone(backend, resource, grant)
    if own is None:
        return None
    first = first_id(backend, resource, grant.device)
    shared = grant.id == first or _alone(backend, resource, Grant(first, grant.device)) == own
    return spec.device(first if shared else grant.id), own


def _alone(backend: Backend[Any], resource: Resource[Any], grant: Grant) -> ContainerEdits | None:
    """The nodes and mounts of one grant; None if it would be refused."""
    try:
        found = ask(lambda: backend_answers.edits(backend.edits(resource, [grant])))
    except AllocationRefused:
        return None
    return ContainerEdits(found.nodes, found.mounts)


# --- in step with the lists ---


class Specifications:
    """The specifications of all resources."""

    def __init__(
        self,
        host: Host,
        state_dir: Path,
        inventory: Inventory,
        backends: Mapping[str, Backend[Any]],
        problems: Problems,
    ) -> None:
        """Prepare; `backends` are those in force now, by their kinds."""
        self._host, self._directory = host, Directory(host, state_dir)
        self._inventory, self._backends = inventory, backends
        self._problems = problems
        self._watch = DirectoryWatch(self._removed, lambda: self.changed(self._written), problems=problems)
        self._watch.watch(frozenset({host.local(spec.DIRECTORY)}))
        self._troubles = Troubles(self._trouble)
        self._written: set[str] = set()  # resources that have a specification
        self._stale: set[str] = set()
        self._changed = Doorbell()
        self._turn = asyncio.Lock()
        self._workers = Workers("cdi", 1)

    # --- an Allocate ---

    async def answer(self, resource: Resource[Any], grants: Sequence[Grant], edits: ContainerEdits) -> ContainerEdits:
        """The answer to the kubelet, once the specification has what it names.

        Raises:
            AllocationRefused: it cannot be written.
            Exception: whatever the backend raises.
        """
        found = named(self._backends[resource.spec.backend], resource, grants, edits)
        if found is None:
            return edits
        needed = {name: spec.edits(it) for name, it in found.devices.items()}
        try:
            async with pacing.running_timeout(WRITE_DEADLINE), self._turn:
                try:
                    await self._update(resource.name, lambda before: {**before, **needed})
                except CutOffError as error:
                    log.warning("cdi-cut-off", resource=resource.name, reason=words(error), then="writing it again")
                    await self._refresh(resource.name)
                    await self._update(resource.name, lambda before: {**before, **needed})
        except (OSError, NoWorkerError, TimeoutError) as error:
            why = self._report(resource.name, error)
            self.changed([resource.name])  # it is tried again
            if resource.spec.edits == "both":
                return edits
            raise AllocationRefused(
                f"{spec.file(resource.name)}, by which the container runtime knows "
                f"{', '.join(grant.id for grant in grants)} of {resource.name}, cannot be written: {why}. Ask this node's "
                'administrator to let Fairlead write there, or to set edits = "inline".'
            ) from error
        return found.edits

    # --- in step with the lists ---

    def changed(self, resources: Iterable[str]) -> None:
        """These resources have other devices, other claims, or another configuration."""
        if stale := [name for name in resources if self._is_kept(name)]:
            self._stale.update(stale)
            self._changed.set()

    def _is_kept(self, name: str) -> bool:
        resource = self._inventory.resource(name)
        return name in self._written or (resource is not None and resource.spec.edits != "inline")

    async def run(self) -> None:
        """Keep them in step for ever; first, remove those of an earlier run that no resource needs. At the end all stay."""
        try:
            async with self._turn:
                self._written |= await self._workers.start(self._directory.recorded)
            self.changed({*self._written, *self._inventory.names()})
            async with anyio.create_task_group() as tasks:
                await tasks.start(self._watch.run)
                while True:
                    for name in sorted(self._stale):
                        await self._try(name)
                    await self._changed.rung(RETRY if self._stale else math.inf)
        finally:
            self._workers.close()

    def _removed(self, path: Path, change: Change) -> None:
        """Write specifications again that another program removed."""
        if change is Change.REMOVED:
            gone = [it for it in self._written if self._host.local(spec.file(it)) in (path, path / spec.file(it).name)]
            self.changed(gone)

    async def _try(self, name: str) -> None:
        """Write a stale one; it stays stale if it cannot be written."""
        self._stale.discard(name)
        try:
            async with self._turn:
                await self._refresh(name)
        except (OSError, NoWorkerError) as error:
            self._report(name, error)
            self._stale.add(name)
        except Exception:  # a backend's; an Allocate asks it again, and refuses
            log.exception("backend-failed", backend=self._inventory.kind(name), call="edits", resource=name)

    async def _refresh(self, name: str) -> None:
        """Write a specification of the devices that there are, and of those that pods may still name.

        Raises:
            OSError: it cannot be written.
            Exception: whatever the backend raises.
        """
        if name not in self._inventory.names():
            await self._update(name, lambda _: {})
            return
        slots, claims = dict(self._inventory.slots(name)), dict(self._inventory.claims(name))
        resource = self._inventory.resource(name)
        fresh: dict[str, spec.Edits] = {}
        if resource is not None and resource.spec.edits != "inline":
            backend = self._backends[resource.spec.backend]
            devices = {id(slot.device): slot.device for slot in slots.values() if slot.device is not None}
            found = await in_slices(listed(backend, resource, device) for device in devices.values())
            first = dict(zip(devices, found, strict=True))
            found += await in_slices(
                claimed(backend, resource, grant, first.get(id(grant.device))) for grant in _grants(slots, claims)
            )
            fresh = {it[0]: spec.edits(it[1]) for it in found if it is not None}
        kept = self._kept_for_pods(resource, slots, claims)
        await self._update(name, lambda before: {**{it: before[it] for it in before if kept(it)}, **fresh}, every=True)

    def _kept_for_pods(
        self, resource: Resource[Any] | None, slots: Mapping[str, Slot], claims: Iterable[str]
    ) -> Callable[[str], bool]:
        """Tells whether a pod may have been given a name; any name, where a claim's device is gone."""
        theirs: set[str] = set()
        firsts: dict[int, str] = {}  # of a device with a thousand IDs told once
        for device_id in claims:
            slot = slots.get(device_id)
            if resource is None or slot is None or slot.device is None:
                return lambda _: True
            if (first := firsts.get(id(slot.device))) is None:
                first = firsts[id(slot.device)] = first_id(self._backends[resource.spec.backend], resource, slot.device)
            theirs |= {spec.device(device_id), spec.device(first)}
        return theirs.__contains__

    # --- the disk ---

    async def _update(self, name: str, change: Callable[[Devices], Devices], *, every: bool = False) -> None:
        """Write a specification in the thread; the caller holds `_turn`.

        Raises:
            OSError: it cannot be written.
            NoWorkerError: an earlier write hangs.
        """
        if await self._workers.start(partial(self._directory.update, name, change, every=every)):
            self._written.add(name)
        else:
            self._written.discard(name)
        self._troubles.heal(name)

    def _report(self, name: str, error: Exception) -> str:
        """Report why a specification is not written; returns the reason."""
        why = words(error) if str(error) else f"not done within {WRITE_DEADLINE:g} s"
        self._troubles[name].report_once(why)
        return why

    def _trouble(self, name: str) -> Trouble:
        what = f"{spec.file(name)}, which tells container runtimes of {name}, is not written"
        return self._problems.trouble("cdi", what, "cdi-not-written", "cdi-written", resource=name, then="trying again")


def _grants(slots: Mapping[str, Slot], claims: Iterable[str]) -> Iterator[Grant]:
    """What pods hold whose devices are there."""
    for device_id in claims:
        if (slot := slots.get(device_id)) is not None and slot.device is not None:
            yield Grant(device_id, slot.device)
