"""What a person would say happened between two snapshots of a resource; the log and the demo tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent.devices.model import Slot, Snapshot


@dataclass(frozen=True, slots=True)
class Transition:
    """A device (with all its IDs) that appeared, vanished, or changed its health."""

    resource: str
    device: str
    """The device's key; for a tombstone its ID."""
    state: str
    """`Healthy`, `Degraded`, `Unhealthy`, or `Gone` where nothing is listed any more."""
    reason: str
    message: str
    ids: int
    """How many IDs it concerns."""


def transitions(before: Mapping[str, Slot], after: Snapshot) -> list[Transition]:
    """The transitions, one for each device and outcome.

    Args:
        before: the slots of the snapshot before `after`.
        after: the new snapshot.
    """
    changed = after.changed if after.changed is not None else before.keys() | after.slots.keys()
    counts: dict[tuple[str, str, str, str], int] = {}
    for device_id in changed:
        old, new = before.get(device_id), after.slots.get(device_id)
        if (what := _said(new)) == _said(old):
            continue
        key = (_name(new or old, device_id), *what)
        counts[key] = counts.get(key, 0) + 1
    return [Transition(after.resource, *what, ids=n) for what, n in sorted(counts.items())]


def _said(slot: Slot | None) -> tuple[str, str, str]:
    if slot is None:
        return "Gone", "", ""
    return slot.health.state.value, slot.health.reason, slot.health.message


def _name(slot: Slot | None, device_id: str) -> str:
    return slot.device.key if slot and slot.device else device_id
