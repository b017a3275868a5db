"""Makes views of the recorded history of devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from typing import Final

from msgspec.structs import astuple, replace

from agent.console.views import ENDED, Explanation, Fault, Histories, History, Note, Period
from agent.history import timeline
from agent.history.book import Key
from agent.history.recorder import Recorder
from agent.runtime.chunked_work import in_slices

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
