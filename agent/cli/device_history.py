"""Draws how a device was in the last 24 hours: a strip, the hours below it, and the changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Final

from msgspec.structs import replace

from agent.cli import output
from agent.cli.output import bold, wrapped
from agent.console.views import History, Note, Period

_SIGNS: Final[Mapping[str, tuple[str, str]]] = {
    "Unhealthy": ("X", "unhealthy"),
    "Gone": ("_", "gone"),
    "Drained": ("D", "drained"),
    "Degraded": ("~", "degraded"),
    "in use": ("=", "healthy, in use"),
    "Healthy": ("-", "healthy, free"),
    "Unknown": ("?", "unknown"),
}
"""State → its sign and its words, the worst first."""

_BAD: Final = tuple(_SIGNS)[:4]
"""A moment of these shows, however short it was."""

_COLORED: Final = {"Gone": "Unhealthy", "in use": "Healthy"}
_BARS: Final = {
    "Unhealthy": "█",
    "Gone": "·",
    "Drained": "▅",
    "Degraded": "▆",
    "in use": "▃",
    "Healthy": "▁",
    "Unknown": " ",
}
LEGEND: Final = "▁ free ▃ used ▅ drained ▆ degraded █ bad · gone"
"""What a strip's signs mean."""
_SPARKS: Final = 12
"""Signs for the last hour."""
_LABEL: Final = len("|00:00 ")
_HOUR: Final = 3600


def lines(shown: History) -> Iterator[str]:
    """The history as a person reads it."""
    if not shown.periods:
        yield f"{shown.key} has not been offered in the last 24 hours; `fairlead explain` says why."
        return
    yield f"{bold(shown.key)} of {shown.resource} in the last 24 hours"
    yield ""
    cells = list(_cells(shown.periods, output.columns()))
    alike = ((it, _SIGNS[it][0] * len(list(group))) for it, group in groupby(cells))
    yield "".join(output.state(_COLORED.get(it, it), signs) for it, signs in alike)
    yield _hours(shown.periods[0].begins, shown.periods[-1].ends, output.columns())
    yield wrapped("  ".join(f"{sign} {words}" for it, (sign, words) in _SIGNS.items() if it in cells), 0)
    yield ""
    periods = [(it.begins, f"{output.moment(it.begins):<24} {_words(it)}") for it in shown.periods]
    notes = [(it.time, f"{output.moment(it.time):<24} {_happened(it)}") for it in shown.notes]
    for _, line in sorted((*periods, *notes), key=lambda it: it[0]):
        yield wrapped(line, 0, 21)


def spark(periods: Sequence[Period], now: float) -> str:
    """The last hour as a strip of signs, each for five minutes: the taller, the worse, and a dot where it was not there."""
    last = [replace(it, begins=max(it.begins, now - _HOUR)) for it in periods if it.ends > now - _HOUR]
    if not last:
        return ""
    cells = _cells((*last[:-1], replace(last[-1], ends=now)), _SPARKS)
    alike = ((it, _BARS.get(it, "?") * len(list(group))) for it, group in groupby(cells))
    return "".join(output.state(_COLORED.get(it, it), signs) for it, signs in alike)


def happened(note: Note) -> str:
    """What happened, when, and by whom."""
    return f"{output.moment(note.time)} {_happened(note)}"


def _happened(note: Note) -> str:
    often = f", {note.count} times" if note.count > 1 else ""
    process = ", ".join(filter(None, (note.process, f"pid {note.pid}" if note.pid is not None else "")))
    by = f", by {process}" if process else ""
    whose = f", of {' or '.join(note.pods)}" if note.pods else ""
    return f"{note.reason}{often}{by}{whose}: {note.message}"


def _cells(periods: tuple[Period, ...], columns: int) -> Iterator[str]:
    """What each column shows: the worst of its time, or else what was for most of it; the last one, what is now."""
    begin, width = periods[0].begins, (periods[-1].ends - periods[0].begins) / columns
    for n in range(columns):
        start, end = begin + n * width, begin + (n + 1) * width
        lasted: dict[str, float] = {}
        for it in periods:
            if it.begins < end and it.ends > start:
                lasted[_kind(it)] = lasted.get(_kind(it), 0.0) + min(it.ends, end) - max(it.begins, start)
        most = max(lasted, key=lasted.__getitem__) if n < columns - 1 else _kind(periods[-1])
        yield next((it for it in _BAD if it in lasted), most)


def _kind(period: Period) -> str:
    return "in use" if period.state == "Healthy" and period.holders else period.state


def _hours(begin: float, end: float, columns: int) -> str:
    """A mark below the begin of some hours, in UTC."""
    step = next((it for it in (1, 2, 3, 4, 6, 12) if it * columns / 24 >= _LABEL), 24)
    line, hour = "", datetime.fromtimestamp(begin, UTC).replace(minute=0, second=0, microsecond=0)
    for at in range(int(hour.timestamp()) + _HOUR, int(end) + 1, _HOUR):
        hour = datetime.fromtimestamp(at, UTC)
        column, label = round((at - begin) / (end - begin) * columns), hour.strftime("|%H:%M")
        if hour.hour % step == 0 and len(line) <= column <= columns - len(label):
            line += " " * (column - len(line)) + label
    return line


def _words(period: Period) -> str:
    kind = _SIGNS[period.state][1].partition(",")[0] if period.state in _SIGNS else period.state
    reason = period.reason if period.reason not in ("", kind) else ""
    held = f"held by {', '.join(period.holders)}" if period.holders else ""
    free = "free" if period.state == "Healthy" and not period.holders else ""
    said = ", ".join(filter(None, (output.state(_COLORED.get(period.state, period.state), kind), reason, held, free)))
    return f"{said}: {period.message}" if period.message else said
