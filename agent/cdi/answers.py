"""Decides what of an answer the container runtime gets by CDI; pure.

A device's nodes and mounts are its own, and stand in its resource's specification. Environment, annotations and what a
backend itself names by CDI are the whole request's (their values are joined from its devices), and stay in the answer. A
request whose nodes and mounts are not those of its devices together is answered inline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agent.cdi import names
from agent.discovery import backend_answers
from agent.discovery.backend_answers import ask
from backends.base import AllocationRefused, Backend, ContainerEdits, Device, Grant, Resource


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
    every = tuple(names.qualified(resource.name, name) for name in devices)
    told = replace(
        edits,
        annotations={**edits.annotations, names.annotation(resource.name): ",".join(every)},
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
    return None if found is None or not (found.nodes or found.mounts) else (names.device(first), found)


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
    return names.device(grant.id), own


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
    return names.device(first if shared else grant.id), own


def _alone(backend: Backend[Any], resource: Resource[Any], grant: Grant) -> ContainerEdits | None:
    """The nodes and mounts of one grant; None if it would be refused."""
    try:
        found = ask(lambda: backend_answers.edits(backend.edits(resource, [grant])))
    except AllocationRefused:
        return None
    return ContainerEdits(found.nodes, found.mounts)
