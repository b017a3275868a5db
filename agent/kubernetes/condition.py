"""Keeps the Node's condition FairleadDevicesHealthy: whether every device of every resource can be given to pods.

What an operator has drained is no failure. The condition is written when it changes, and every five minutes to show that
Fairlead still looks (as the kubelet does with those of its own: nodeStatusReportFrequency).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final

import anyio
import msgspec
from msgspec import Struct

from agent.inventory.shortfall import Missing
from agent.kubernetes.api import STRATEGIC, Api, ApiError, backoff, read
from agent.kubernetes.notices import EXPECTED, timestamp
from agent.model import Slot
from agent.runtime.errors import brief, some
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Trouble
from agent.runtime.workers import Workers

TYPE: Final = "FairleadDevicesHealthy"

HEARTBEAT: Final = 300.0
"""Seconds after which it is written though it says the same."""

TOGETHER: Final = 2.0
"""Seconds for which changes are gathered."""

_LONGEST: Final = 1000  # characters of a message

Resources = Mapping[str, Mapping[str, Slot]]
"""The slots of every resource."""


class Condition(Struct, frozen=True):
    """What it says."""

    status: str
    """`True` or `False`."""
    reason: str
    message: str


def condition(resources: Resources, missing: Iterable[Missing]) -> Condition:
    """The condition for these slots, and these devices that are not offered."""
    sick: dict[str, str] = {}
    for resource, slots in resources.items():
        for slot in slots.values():
            if not slot.health.offered and slot.health.reason not in EXPECTED:
                device = slot.device.key if slot.device else slot.id
                sick.setdefault(f"{device} of {resource}", slot.health.reason)
    absent = {f"{it.device} of {it.resource}": it.reason for it in missing}
    if not (sick or absent):
        return Condition("True", "DevicesHealthy", "every device can be given to pods")
    told = [f"{device} ({reason})" for those in (sick, absent) for device, reason in sorted(those.items())]
    message = f"{len(sick)} unhealthy, {len(absent)} not offered: {some(told)}"
    return Condition("False", "DevicesUnhealthy" if sick else "DevicesNotOffered", brief(message, _LONGEST))


class _Known(msgspec.Struct, rename="camel"):
    """A condition that the Node has."""

    type: str
    status: str
    last_transition_time: str | None = None


class _Status(msgspec.Struct):
    conditions: list[_Known] = []


class _Node(msgspec.Struct):
    status: _Status = msgspec.field(default_factory=_Status)


class ConditionKeeper:
    """Writes the condition when it changes, and every five minutes."""

    def __init__(
        self,
        node: str,
        resources: Callable[[], Resources],
        missing: Callable[[], Iterable[Missing]],
        unwritten: Trouble,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`resources` has the slots of every resource, copies, which a thread reads; `missing` what is not offered."""
        self._path = f"/api/v1/nodes/{node}"
        self._resources, self._missing, self._unwritten = resources, missing, unwritten
        self._clock, self._wall = clock, wall
        self._since: str | None = None  # when the status that is written became so
        self._changed = Doorbell()

    def changed(self) -> None:
        """Something about devices has changed."""
        self._changed.set()

    async def run(self, api: Api, workers: Workers) -> None:
        """Write, until cancelled; decided in a thread of `workers`, since there may be 10,000 devices."""
        written, written_at, tries = None, 0.0, backoff()
        while True:
            now = await workers.start(partial(condition, self._resources(), list(self._missing())))
            if now != written or self._clock() - written_at >= HEARTBEAT:
                try:
                    await self._write(api, now, written)
                except ApiError as error:
                    if error.status:
                        self._unwritten.report_once(error.sentence)
                    await anyio.sleep(tries.next())
                    continue
                self._unwritten.healed()
                written, written_at = now, self._clock()
                tries.reset()
            await self._changed.rung(max(0.0, written_at + HEARTBEAT - self._clock()), gather=TOGETHER)

    async def _write(self, api: Api, now: Condition, before: Condition | None) -> None:
        """Write it; `before` is what we wrote last, if anything.

        Raises:
            ApiError: it cannot be written.
        """
        moment = timestamp(self._wall())
        if before is None:  # what an earlier run of ours wrote says since when it is so
            node = read(await api.call("GET", self._path), _Node)
            known = next((it for it in node.status.conditions if it.type == TYPE), None)
            is_same = known is not None and known.status == now.status
            self._since = known.last_transition_time if known and is_same else None
        elif before.status != now.status:
            self._since = moment
        self._since = self._since or moment
        told = {
            "type": TYPE,
            "status": now.status,
            "reason": now.reason,
            "message": now.message,
            "lastHeartbeatTime": moment,
            "lastTransitionTime": self._since,
        }
        await api.call("PATCH", f"{self._path}/status", {"status": {"conditions": [told]}}, STRATEGIC)
