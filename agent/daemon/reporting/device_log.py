"""Tells the log and the counts what changed between two snapshots of a resource, as a person would say it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from agent.inventory.device_names import model_of, name_of
from agent.model import Health, Slot, Snapshot, State, Transition
from agent.runtime.chunked_work import BATCH, in_batches
from agent.runtime.counts import Counts
from backends.base import Device

_WELL: Final = ("Healthy", "Degraded")
"""States in which pods may have it; any other is a loss, which is a warning."""

_GONE: Final = "Gone"

LOGGED_AT_MOST: Final = 10
"""Transitions of one snapshot, or devices of one look, that get a line each."""

log = structlog.get_logger()


Why = Callable[[Device], tuple[str, str]]
"""Why a device is on a list no more, in a word and a sentence."""

_RELEASED: Final = ("released", "no pod holds it any more")
"""Of what was listed only because a pod held it."""


async def tell(before: Mapping[str, Slot] | None, snapshot: Snapshot, counts: Counts, why: Why) -> Transitions:
    """One line for each device whose state changed, or is not well from the first list on, with its reason.

    The changes are counted, and handed back.
    """
    happened = await transitions(before or {}, snapshot, why)
    if before is None:
        healthy = sum(slot.health.offered for slot in snapshot.slots.values())
        log.info("resource-listed", resource=snapshot.resource, count=len(snapshot.slots), healthy=healthy)
        happened = happened.without(State.HEALTHY)
    else:
        for cause, number in happened.causes().items():
            counts.transitions[snapshot.resource, cause] += number
    for it in happened.first(LOGGED_AT_MOST):
        (log.info if it.state in _WELL else log.warning)(
            "device-changed", resource=it.resource, device=it.device, called=it.name, state=it.state, reason=it.reason,
            message=it.message, count=it.ids,
        )  # fmt: skip
    if len(happened) > LOGGED_AT_MOST:
        (log.warning if happened.losses() > LOGGED_AT_MOST else log.info)(
            "devices-changed", resource=snapshot.resource, count=len(happened) - LOGGED_AT_MOST
        )
    return happened


_Said = tuple[str, str, str]
_Key = tuple[str, str, str, str]


class Transitions(Struct, frozen=True):
    """The transitions between two snapshots, one for each device and outcome; there may be 10,000."""

    resource: str
    counts: Counter[_Key]
    """Device, state, reason, message → how many IDs."""
    names: Mapping[str, str]
    """Device → what people call it."""

    def __len__(self) -> int:
        return len(self.counts)

    def first(self, most: int) -> list[Transition]:
        """So many of them, losses before others, in their order."""
        first = heapq.nsmallest(most, self.counts, key=lambda it: (it[1] in _WELL, it))
        return [Transition(self.resource, *key, self.counts[key], self.names.get(key[0], "")) for key in first]

    def losses(self) -> int:
        """How many devices pods can have no more."""
        return sum(state not in _WELL for _, state, _, _ in self.counts)

    def without(self, state: State) -> Transitions:
        """Those to other states."""
        counts = Counter({key: number for key, number in self.counts.items() if key[1] != state.value})
        return replace(self, counts=counts)

    def causes(self) -> Counter[str]:
        """How many there are of each reason, or state where there is none."""
        return Counter("gone" if state == _GONE else reason or state.lower() for _, state, reason, _ in self.counts)


async def transitions(before: Mapping[str, Slot], after: Snapshot, why: Why) -> Transitions:
    """What happened; of many IDs, in several steps of the loop.

    Args:
        before: the slots of the snapshot before `after`.
        after: the new snapshot.
        why: tells why devices left.
    """
    counts: Counter[_Key] = Counter()
    devices: dict[str, Device] = {}
    left: dict[str, _Said] = {}  # by the device, since it may have had many IDs
    said: dict[int, _Said] = {}  # by the health, which is one object for what is alike
    async for ids in in_batches(after.changed_since(before), 10 * BATCH):
        for device_id in ids:
            old, new = before.get(device_id), after.slots.get(device_id)
            was, now = old and old.health, new and new.health
            if was is now:
                continue
            for health in (was, now):
                if health is not None and id(health) not in said:
                    said[id(health)] = _said_of(health)
            key = _key(new or old, device_id)
            if now is not None:
                what = said[id(now)]
            elif (gone := left.get(key)) is not None:
                what = gone
            else:
                what = left[key] = _left(old, why)
            if was is None or said[id(was)] != what:
                counts[key, *what] += 1
                if (slot := new or old) and slot.device:
                    devices[key] = slot.device
    return Transitions(after.resource, counts, {key: _name(device) for key, device in devices.items()})


def of_id(resource: str, device_id: str, old: Slot | None, new: Slot | None, why: Why) -> Transition | None:
    """What happened to one ID, if anything."""
    was, now = (it.health if it else None for it in (old, new))
    if was is now or (was is not None and now is not None and was.says_what(now)):
        return None
    slot = new or old
    what = _said_of(now) if now else _left(old, why)
    name = _name(slot.device) if slot and slot.device else ""
    return Transition(resource, _key(slot, device_id), *what, ids=1, name=name)


def _said_of(health: Health) -> _Said:
    return health.state.value, health.reason, health.message


def _left(slot: Slot | None, why: Why) -> _Said:
    return (_GONE, *(why(slot.device) if slot and slot.device else _RELEASED))


def _key(slot: Slot | None, device_id: str) -> str:
    return slot.device.key if slot and slot.device else device_id


def _name(device: Device) -> str:
    return " ".join(filter(None, (model_of(device.attributes), name_of(device.attributes))))
