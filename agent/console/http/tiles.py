"""Draws a device: what it is and how, at a glance; opened, all that is known of it and how it was in the last 24 hours. Pure."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from msgspec.structs import replace

from agent.console.advice import Advice, of_device, told
from agent.console.http.html import Html, h, join, many, moment
from agent.console.http.topology import NOT_OFFERED, Tile
from agent.console.views import Device, Event, Held, Note, Period
from agent.inventory.shortfall import WENT

SIGNS: Final = {"Healthy": "✓", "Drained": "‖", "Degraded": "!", NOT_OFFERED: "–", "Unhealthy": "✕"}
"""So that colour is not the only sign."""

Past = tuple[Period, ...]
"""How a device was, the oldest first."""

_IDS_SHOWN: Final = 8
_HOLDERS_SHOWN: Final = 20
_NOTES_SHOWN: Final = 10


def name(tile: Tile) -> str:
    """The ID of the tile's element, which stays the same while the device is there."""
    return element("d", f"{tile.resource}\0{tile.key}")


def element(kind: str, what: str) -> str:
    """The ID of an element, made of what it is about."""
    return f"{kind}-{hashlib.blake2s(what.encode(errors='replace'), digest_size=8).hexdigest()}"


def sign(state: str) -> Html:
    """The state's symbol; screen readers skip it, since the state's name is beside it."""
    return h("span", SIGNS.get(state, "?"), class_=f"sign {_kind(state)}", aria_hidden="true")


def _kind(state: str) -> str:
    """The state's CSS class."""
    return state.lower().replace(" ", "-")


def drawn(tile: Tile, past: Past = (), happened: Sequence[Event] = (), notes: Sequence[Note] = ()) -> Html:
    """The inside of a tile: the device, its history, the events about it, and what happened to its hardware beside."""
    worst = tile.worst
    return h(
        "details",
        h(
            "summary",
            sign(worst.condition),
            h("span", tile.title, class_="title"),
            h("span", tile.key, class_="key") if tile.title != tile.key else None,
            h(
                "span",
                h("span", worst.condition, class_="state"),
                h("span", worst.message if tile.missing else worst.reason, class_="reason")
                if worst.reason not in ("", worst.condition.lower())
                else None,
                h("span", f"noted: {notes[-1].reason}", class_="reason") if notes else None,
                _use(tile),
                class_="line",
            ),
            _share(tile),
        ),
        h(
            "div",
            [_about(device) for device in tile.views],
            _where(tile.resource, worst),
            _history(past, f"{name(tile)}-h", tile.key, happened) if past else None,
            _beside(notes, tile.key) if notes else None,
            class_="more",
        ),
        class_=f"device {_kind(worst.condition)}" + " held" * bool(_held(tile)) + " gone" * (worst.reason == WENT),
    )


def _held(tile: Tile) -> list[Held]:
    return [held for device in tile.views for held in device.held]


def _use(tile: Tile) -> Html | None:
    """Which pod has it, or how many of its IDs are in use."""
    held = _held(tile)
    if (total := _total(tile)) > 1:
        return h("span", f"{len(held):,} of {total:,} in use", class_="use")
    if not held:
        return h("span", "free", class_="use") if tile.worst.state in ("Healthy", "Degraded") else None
    holders = held[0].holders
    named = (h("span", "in use by ", class_="unseen"), holders[0].pod or holders[0].name) if holders else ("in use",)
    return h("span", *named, class_="use")


def _share(tile: Tile) -> Html | None:
    """How many of its IDs are in use, as a bar."""
    if (total := _total(tile)) <= 1:
        return None
    return h("meter", min=0, max=total, value=len(_held(tile)), aria_label=f"{tile.title}: share in use")


def _total(tile: Tile) -> int:
    return 0 if tile.missing else sum(len(device.ids) for device in tile.views)


def _about(device: Device) -> Html:
    """One state of the device, with the IDs in that state."""
    is_said = not device.reason or device.condition != device.state
    reason = device.condition if is_said else f"{device.state}: {device.reason}"
    found = of_device(device, device.name)
    return join(
        h("p", h("strong", reason), h("br"), device.message or None, class_="health"),
        join(h("p", "What to do:"), advised(found)) if found is not None else None,
        h("dl", _rows(device, ends="" if found is not None and found.ends else device.ends)),
    )


def advised(it: Advice) -> Html:
    """What a reason asks of a person."""
    rows = [join(h("dt", label), h("dd", h("code", text) if label == "run" else text)) for label, text in told(it)]
    return h("dl", rows, class_="advice")


def _rows(device: Device, ends: str) -> Iterator[Html]:
    if device.since:
        yield _row("Since", moment(device.since))
    if ends:
        yield _row("Ends with", ends)
    if len(device.ids) == 1:
        yield _row("ID", h("code", device.ids[0]))
    elif device.ids:
        yield _row(many(len(device.ids), "ID"), _some(device.ids))
    if device.held:
        yield _row("Held by", _holders(device))


def _where(resource: str, device: Device) -> Html:
    rows = [_row("Resource", resource)]
    if device.hardware:
        rows.append(_row("Hardware", _some(device.hardware)))
    if device.numa_node is not None:
        rows.append(_row("NUMA node", str(device.numa_node)))
    if device.ancestry:
        rows.append(_row("Below", h("code", " › ".join(device.ancestry))))
    return h("dl", rows)


def _holders(device: Device) -> Html:
    """Each container once, with how many IDs it has."""
    number = Counter(holder for held in device.held for holder in held.holders)
    lines: list[Html] = [
        h(
            "li",
            who.name,
            h("span", f" ({who.container})") if who.container else None,
            f", {many(ids, 'ID')}" if ids > 1 else None,
        )
        for who, ids in sorted(number.items(), key=lambda item: (-item[1], item[0].namespace, item[0].pod))[
            :_HOLDERS_SHOWN
        ]
    ]
    if len(number) > _HOLDERS_SHOWN:
        lines.append(h("li", f"and {many(len(number) - _HOLDERS_SHOWN, 'more container')}"))
    if unknown := sum(not held.holders for held in device.held):
        lines.append(
            h("li", f"{many(unknown, 'ID')} by pods that the kubelet does not name: they start, or have ended")
        )
    return h("ul", lines)


def _beside(notes: Sequence[Note], key: str) -> Html:
    """What happened to its hardware and changed no health, the newest first."""
    more = len(notes) - _NOTES_SHOWN
    return h(
        "div",
        h("p", "Happened in the last 24 hours, and changed nothing of its health:", class_="quiet"),
        h("ol", [_note(note) for note in notes[: -_NOTES_SHOWN - 1 : -1]]),
        h("p", f"and {more:,} before: ", h("code", f"fairlead status --history {key}")) if more > 0 else None,
        class_="past notes",
    )


def _note(note: Note) -> Html:
    often = f", {note.count:,} times" if note.count > 1 else ""
    by = f", process {note.pid}" * (note.pid is not None) + f" ({note.process})" * bool(note.process)
    whose = f", of {' or '.join(note.pods)}" if note.pods else ""
    return h("li", moment(note.time), h("p", h("strong", note.reason), f"{often}{by}{whose}"), h("p", note.message))


def _some(texts: tuple[str, ...]) -> Html:
    shown = [join(h("code", text), " ") for text in texts[:_IDS_SHOWN]]
    more = f"and {len(texts) - _IDS_SHOWN:,} more" if len(texts) > _IDS_SHOWN else None
    return join(shown, more)


def _row(term: str, meaning: Html | str) -> Html:
    return join(h("dt", term), h("dd", meaning))


# --- how it was in the last 24 hours: a strip whose parts lead to the changes below it ---


_DAY: Final = 86400
_STEP: Final = 900
"""Seconds after which the strip moves on: else each tile would be another every second."""

_MINUTES: Final = _DAY // 60  # the strip's width
_LEAST: Final = 12  # minutes that a period is wide, however short: it is to be seen, and hit
_APART: Final = 4  # minutes between two bars of one look, at least: a browser that draws both shows one
_TOPS: Final[Mapping[str, int]] = {"Unknown": 22, "Healthy": 14, "Degraded": 8, "Drained": 8, "Gone": 8, "Unhealthy": 0}
"""State → where its bar begins, of 24 down to its foot; the worse, the taller, and the later drawn."""

_HELD_TOP, _HELD_HEIGHT, _HEIGHT = 27, 5, 32
_CHANGES_SHOWN: Final = 20  # changes
_TITLE: Final = "The last 24 hours, in UTC. The taller a bar, the worse; below it a line where a pod had the device."
_AROUND: Final = 10.0  # seconds before and after a change whose events belong to it


def clipped(periods: Past, now: float) -> Past:
    """The periods as they are drawn: the same for a quarter of an hour, unless something changes."""
    end = math.ceil(now / _STEP) * _STEP
    begin = end - _DAY
    left = [replace(it, begins=max(it.begins, begin)) for it in periods if it.ends > begin]
    return (*left[:-1], replace(left[-1], ends=float(end))) if left else ()


def _history(past: Past, name: str, key: str, happened: Sequence[Event]) -> Html:
    """The strip with its hours and changes; one sentence where nothing changed.

    `past` is clipped, `name` the ID of the tile's element, and `happened` has the page's events about the device.
    """
    known = [it for it in past if it.state != "Unknown"]
    if not any((it.state, it.holders) != ("Healthy", ()) for it in known):
        gaps = " while Fairlead ran" if len(known) < len(past) else ""
        return h("p", f"In the last 24 hours nothing happened to it{gaps}.", class_="quiet")
    names = list(_names(past, name))
    newest = [_change(it, at, happened) for it, at in list(zip(past, names, strict=True))[: -_CHANGES_SHOWN - 1 : -1]]
    more = len(past) - _CHANGES_SHOWN
    return h(
        "div",
        h("p", _TITLE, class_="quiet"),
        _strip(past, names),
        _hours(past[0].begins),
        h("ol", newest),
        h("p", f"and {many(more, 'change')} before: ", h("code", f"fairlead status --history {key}"))
        if more > 0
        else None,
        class_="past",
    )


def _names(past: Past, name: str) -> Iterator[str]:
    """The IDs of the changes' elements: they stay the same, since each is made of the second of the change."""
    seen = Counter[int]()
    for period in past:
        second = int(period.begins)
        seen[second] += 1
        yield f"{name}-{second}" + (f"-{seen[second]}" if seen[second] > 1 else "")


def _strip(past: Past, names: Sequence[str]) -> Html:
    """The drawing; people who cannot see or click it have the list."""
    bars = {_seen(it, past[0].begins): (it, name) for it, name in zip(past, names, strict=True)}
    ordered = sorted(bars.values(), key=lambda it: list(_TOPS).index(it[0].state) if it[0].state in _TOPS else 0)
    return h(
        "svg",
        [_part(period, name, past[0].begins) for period, name in ordered],
        class_="strip",
        viewBox=f"0 0 {_MINUTES} {_HEIGHT}",
        preserveAspectRatio="none",
        aria_hidden="true",
        focusable="false",
    )


def _seen(period: Period, begin: float) -> tuple[str, bool, int, int]:
    """How a period looks; of those that look the same the last is drawn."""
    x, width = _across(period, begin)
    return period.state, bool(period.holders), round(x / _APART), round((x + width) / _APART)


def _across(period: Period, begin: float) -> tuple[float, float]:
    """Where a period's bar begins, and how wide it is."""
    width = max(_LEAST, (period.ends - period.begins) / 60)
    return min((period.begins - begin) / 60, _MINUTES - width), width


def _part(period: Period, name: str, begin: float) -> Html:
    x, width = _across(period, begin)
    across = {"x": f"{x:.1f}", "width": f"{width:.1f}"}
    top = _TOPS.get(period.state, 0)
    return h(
        "a",
        h("title", f"{period.state} from {_clock(period.begins)} UTC"),
        h("rect", y=0, height=_HEIGHT, class_="hit", **across),
        h("rect", y=top, height=24 - top, class_=period.state.lower(), **across),
        h("rect", y=_HELD_TOP, height=_HELD_HEIGHT, class_="by", **across) if period.holders else None,
        href=f"#{name}",
        tabindex="-1",
    )


def _hours(begin: float) -> Html:
    """Four marks, six hours apart."""
    marks = (_clock(begin + quarter * _DAY / 4) for quarter in range(4))
    return h("p", [h("span", mark) for mark in marks], class_="hours", aria_hidden="true")


def _change(period: Period, name: str, happened: Sequence[Event]) -> Html:
    """One period, with the events of its begin."""
    words = [period.state, period.reason if period.reason != period.state.lower() else ""]
    events = [it for it in happened if abs(it.time - period.begins) <= _AROUND]
    return h(
        "li",
        moment(period.begins),
        h("p", h("strong", ", ".join(filter(None, words))), _held_by(period)),
        h("p", period.message) if period.message else None,
        h("p", "Events: ", _links(events)) if events else None,
        id=name,
    )


def _held_by(period: Period) -> str:
    if period.holders:
        return f", held by {', '.join(period.holders)}"
    return ", free" if period.state == "Healthy" else ""


def _links(events: Sequence[Event]) -> Html:
    return Html(", ".join([h("a", it.kind, href=f"#e-{it.number}") for it in events]))


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M")
