"""Writes to the log what happened to the devices of a resource."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import structlog

from agent.daemon.transitions import transitions
from agent.model import Slot, Snapshot
from agent.runtime.counts import Counts

LOGGED_AT_MOST: Final = 10
"""Transitions of one snapshot that get a line each."""

log = structlog.get_logger()


async def tell(before: Mapping[str, Slot] | None, snapshot: Snapshot, counts: Counts) -> None:
    """One line for each device whose state changed, with its reason; all of them are counted."""
    if before is None:
        healthy = sum(slot.health.offered for slot in snapshot.slots.values())
        log.info("resource-listed", resource=snapshot.resource, count=len(snapshot.slots), healthy=healthy)
        return
    happened = await transitions(before, snapshot)
    for cause, number in happened.causes().items():
        counts.transitions[snapshot.resource, cause] += number
    for it in happened.first(LOGGED_AT_MOST):
        log.info(
            "device-changed", resource=it.resource, device=it.device, state=it.state, reason=it.reason,
            message=it.message, count=it.ids,
        )  # fmt: skip
    if len(happened) > LOGGED_AT_MOST:
        log.info("devices-changed", resource=snapshot.resource, count=len(happened) - LOGGED_AT_MOST)
