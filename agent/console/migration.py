"""Finds what pods hold through other plugins, and which devices of ours that is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Final

from msgspec import Struct

from agent.claims.foreign_claims import Tracer
from agent.inventory.inventory import Inventory
from agent.kubelet import checkpoint
from agent.kubelet.checkpoint import CheckpointEntry, CheckpointError
from agent.kubelet.podresources import PodResourcesError, list_pods

_PATIENCE: Final = 5.0  # seconds for the kubelet's answer


class Holding(Struct, frozen=True):
    """What one container has of one resource."""

    resource: str
    ids: tuple[str, ...]
    pod: str
    """Namespace and name; its UID where the kubelet does not list it."""
    container: str
    devices: tuple[str, ...]
    """Keys of ours that are the same hardware; empty if nothing that the container got leads to any."""
    same_ids: bool
    """Does each ID name the same device with us?"""
    ours: bool
    """Is the resource one of the configuration's?"""


class Holders(Struct, frozen=True):
    """All holdings, as far as the kubelet tells."""

    holdings: tuple[Holding, ...] = ()
    unread: tuple[str, ...] = ()
    """Why a witness could not be asked, whole sentences."""


async def holders(inventory: Inventory, plugin_dir: Path, pod_resources: Path) -> Holders:
    """What pods of this node hold of the inventory's resources, or of hardware that its devices have.

    Args:
        inventory: of the configuration that is to come.
        plugin_dir: where the kubelet's checkpoint lies.
        pod_resources: the kubelet's podresources socket, which knows pods by name.
    """
    unread: list[str] = []
    entries: Iterable[CheckpointEntry] = ()
    try:
        if (found := checkpoint.read(plugin_dir)) is not None:
            entries = found.entries
        else:
            unread.append(
                f"{plugin_dir} has no checkpoint: no pod of this node has ever had a device, or it is elsewhere."
            )
    except CheckpointError as error:
        unread.append(f"{error}.")
    names: dict[tuple[str, str, str], str] = {}
    try:
        for it in await list_pods(pod_resources, _PATIENCE):
            names.update({(it.resource, device_id, it.container): f"{it.namespace}/{it.pod}" for device_id in it.ids})
    except PodResourcesError as error:
        unread.append(f"{error}: pods are shown by their UIDs, and some may have ended.")
    holdings = [it async for it in _holdings(inventory, entries, names)]
    return Holders(tuple(sorted(holdings, key=lambda it: (it.resource, it.pod, it.container, it.ids))), tuple(unread))


async def _holdings(
    inventory: Inventory, entries: Iterable[CheckpointEntry], names: dict[tuple[str, str, str], str]
) -> AsyncIterator[Holding]:
    tracer = Tracer(inventory)
    for entry in entries:
        kind, trace = inventory.kind(entry.resource), await entry.trace()
        slots = [inventory.slot(entry.resource, device_id) for device_id in entry.ids] if kind else []
        known = {slot.device.key for slot in slots if slot and slot.device}
        hardware = frozenset[str]().union(*(led_to for _, led_to in tracer.ours(trace)))
        if kind is not None:
            hardware |= tracer.hardware(trace, kind)
        if kind is None and not hardware:
            continue
        devices = known | {found.device.key for found in inventory.on(hardware)}
        pod = next(
            (name for i in entry.ids if (name := names.get((entry.resource, i, entry.container)))), entry.pod_uid
        )
        yield Holding(
            entry.resource,
            entry.ids,
            pod,
            entry.container,
            tuple(sorted(devices)),
            same_ids=bool(slots) and all(slot is not None and slot.device is not None for slot in slots),
            ours=kind is not None,
        )
