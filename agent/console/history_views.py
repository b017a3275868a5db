"""Makes views of the recorded history of devices."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import astuple, replace

from agent.console.views import Explanation, Histories, History, Note, Period
from agent.history import timeline
from agent.history.book import Key
from agent.history.recorder import Recorder
from agent.runtime.chunked_work import in_slices


def history_of(noted: Recorder, it: Explanation, former: Iterable[Key]) -> History:
    """The history of the device that an explanation is about; `former` is what its hardware was offered as before."""
    known = noted.devices()
    names = (it.resource, *(one.resource for one in it.decisions))
    keys = [noted.tombs().get((name, it.key), (name, it.key)) for name in names if name]
    key = keys[0] if it.resource else next((key for key in (*former, *keys) if key in known), None)
    return replace(_history(noted, key, key) if key else History(it.key, ""), notes=it.notes)


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
