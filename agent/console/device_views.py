"""Makes views of devices: what each is called, where it is, how it is, and how it was in the last 24 hours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby, pairwise
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import astuple, replace

from agent.console import views
from agent.console.views import ENDED, Explanation, Fault, Histories, History, Note, Period
from agent.health import Statement
from agent.health.drains import moment
from agent.history import timeline
from agent.history.recorder import Recorder
from agent.history.timeline import Key
from agent.inventory.lookup import model_of, name_of
from agent.model import Slot, Snapshot
from agent.runtime.workers import BATCH, in_batches, in_slices
from backends.base import Device, Verdict

Signals = Callable[[str], Iterable[Statement]]
"""What is said of a piece of hardware now."""

_View = TypeVar("_View", views.Device, views.Unclaimed)


_NODES: Final = 8  # a directory of nodes is one device


class Drawn(Struct, frozen=True):
    """The devices of a list as they are shown, without who holds them."""

    snapshot: Snapshot
    devices: tuple[views.Device, ...]
    numbers: Mapping[str, int]
    """ID → the device's number."""


def described(view: _View, device: Device) -> _View:
    """A view with what the device is, and where."""
    return replace(
        view,
        numa_node=device.numa_node,
        ancestry=device.ancestry,
        hardware=tuple(sorted(device.hardware)),
        name=name_of(device.attributes),
        model=model_of(device.attributes),
        nodes=tuple(node.path.text for node in device.nodes[:_NODES]),
    )


async def draw(snapshot: Snapshot, wall: Callable[[float], float], signals_of: Signals) -> Drawn:
    """The list's devices, each once for every state that some of its IDs are in."""
    ids: dict[tuple[int, int], list[str]] = {}
    alike: dict[tuple[int, int], Slot] = {}
    order: dict[tuple[int, int], tuple[str, str]] = {}
    async for slots in in_batches(snapshot.slots.values(), 10 * BATCH):
        for slot in slots:
            key = (id(slot.device) if slot.device else id(slot), id(slot.health))
            if key not in alike:
                alike[key], order[key], ids[key] = slot, _order(slot), []
            ids[key].append(slot.id)
    keys = sorted(order, key=order.__getitem__)
    numbers = {device_id: number for number, key in enumerate(keys) for device_id in ids[key]}
    devices = await in_slices(_device(alike[key], tuple(ids[key]), wall, signals_of) for key in keys)
    return Drawn(snapshot, tuple(devices), numbers)


def _order(slot: Slot) -> tuple[str, str]:
    return slot.device.key if slot.device else slot.id, slot.health.state.value


def _device(slot: Slot, ids: tuple[str, ...], wall: Callable[[float], float], signals_of: Signals) -> views.Device:
    device, health = slot.device, slot.health
    since = wall(health.since) if health.since else 0.0
    key = device.key if device else slot.id
    view = views.Device(key, ids, health.state.value, health.reason, health.message, since)
    if device is None:
        return replace(view, ends="its return, or the end of the pod that has it")
    if health.reason:
        said = [one for name in sorted(device.hardware | device.depends) for one in signals_of(name) if one.counts]
        view = replace(view, ends="; and ".join(dict.fromkeys(_end(one, wall) for one in said)), **of_drain(said, wall))
    return described(view, device)


def of_drain(said: Iterable[Statement], wall: Callable[[float], float]) -> dict[str, str]:
    """What a view of a drained device says besides: the worst reason that the drain covers, and when the drain ends."""
    counting = [it for it in said if it.counts]
    drain = next((it for it in counting if it.source == "operator"), None)
    if drain is None:
        return {}
    covered = (it for it in counting if it.source != "operator")
    worst = min(covered, key=lambda it: it.verdict is Verdict.DEGRADED, default=None)
    return {"besides": worst.reason if worst else "", "until": _at(drain, wall)}


def _at(said: Statement, wall: Callable[[float], float]) -> str:
    """When time alone changes it; empty if it does not."""
    return "" if said.changes is None else moment(wall(said.changes))


def _end(said: Statement, wall: Callable[[float], float]) -> str:
    """What ends one thing that is said of hardware."""
    at = _at(said, wall)
    if said.source == "operator":
        return f"{views.ENDS['operator']}, or at {at}" if at else views.ENDS["operator"]
    if said.source == "quarantine":
        return f"time, at {at} if it stays well, or {views.ENDS['operator']}"
    if said.waits_for:
        return " or ".join(views.ENDS[clears] for clears in sorted(it.value for it in said.waits_for))
    return "the next look that finds it well"


# --- the last 24 hours ---


_BAD: Final = (timeline.DEGRADED, timeline.UNHEALTHY)
_THEN: Final[Mapping[str, str]] = {
    timeline.HEALTHY: "then it was well again",
    timeline.DRAINED: "then it was drained",
    timeline.GONE: "then it was gone",
    timeline.UNKNOWN: "then Fairlead did not run",
}


def history_of(noted: Recorder, it: Explanation, former: Iterable[Key]) -> History:
    """The history of the device that an explanation is about; `former` is what its hardware was offered as before."""
    known = noted.devices()
    names = (it.resource, *(one.resource for one in it.decisions))
    keys = [noted.tombs().get((name, it.key), (name, it.key)) for name in names if name]
    key = keys[0] if it.resource else next((key for key in (*former, *keys) if key in known), None)
    return replace(_history(noted, key, key) if key else History(it.key, ""), notes=it.notes)


def last_fault(past: History, covered: str) -> Fault | None:
    """The last fault that is over; `covered` is what the device has now beside a drain."""
    alike = [list(group) for _, group in groupby(past.periods, key=lambda it: (it.state, it.reason))]
    for bad, after in reversed(list(pairwise(alike))):
        first, last, then = bad[0], bad[-1], after[0]
        if first.state not in _BAD or (then.state == timeline.DRAINED and covered == first.reason):
            continue
        notes = (it for it in past.notes if it.reason == first.reason and it.time >= first.begins)
        end = next((it for it in notes if it.message.startswith(ENDED)), None)
        if end is not None:
            return Fault(first.reason, first.message, first.begins, end.time, end.message.partition(";")[0])
        by = _THEN.get(then.state, f"then it had {then.reason}")
        return Fault(first.reason, first.message, first.begins, last.ends, by)
    return None


def notes_of(noted: Recorder, it: Explanation) -> tuple[Note, ...]:
    """What happened to the hardware of the device that an explanation is about, and to what it depends on."""
    return tuple(map(_note, noted.notes.of((*it.hardware, *it.depends))))


def history_by_key(noted: Recorder, device: str) -> History | None:
    """The history of a device that is gone, by the key that it had."""
    key = next((key for key in sorted(noted.devices()) if device in (key[1], "/".join(key))), None)
    return _history(noted, key, key) if key else None


async def histories(noted: Recorder) -> Histories:
    """The histories of all devices; a tombstone has that of the device that it stands for."""
    known = {key: key for key in noted.devices()} | dict(noted.tombs())
    others = await in_slices(_history(noted, shown, key) for shown, key in known.items())
    notes = sorted(noted.notes.all(), key=lambda it: it.time)
    return Histories(_history(noted, ("", ""), ("", "")).periods, tuple(others), tuple(map(_note, notes)))


def _note(it: timeline.Note) -> Note:
    return Note(*astuple(it))


def _history(noted: Recorder, shown: Key, key: Key) -> History:
    periods = (Period(it.begins, it.ends, *astuple(it.condition)) for it in noted.of(key))
    return History(shown[1], shown[0], tuple(periods))
