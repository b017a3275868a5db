"""Draws how a device was in the last 24 hours: a strip whose parts lead to the changes below it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from msgspec.structs import replace

from agent.console.http.page.html import Html, h, join, many, moment
from agent.console.views import Event, Period

Past = tuple[Period, ...]

_DAY: Final = 86400
_STEP: Final = 900
"""Seconds after which the strip moves on: else each tile would be another every second."""

_MINUTES: Final = _DAY // 60  # the strip's width
_LEAST: Final = 12  # minutes that a period is wide, however short: it is to be seen, and hit
_APART: Final = 4  # minutes between two bars of one look, at least: a browser that draws both shows one
_TOPS: Final[Mapping[str, int]] = {"Unknown": 22, "Healthy": 14, "Degraded": 8, "Drained": 8, "Gone": 8, "Unhealthy": 0}
"""State → where its bar begins, of 24 down to its foot; the worse, the taller, and the later drawn."""

_HELD_TOP, _HELD_HEIGHT, _HEIGHT = 27, 5, 32
_LISTED: Final = 20  # changes
_TITLE: Final = "The last 24 hours, in UTC. The taller a bar, the worse; below it a line where a pod had the device."
_AROUND: Final = 10.0  # seconds before and after a change whose events belong to it


def clipped(periods: Past, now: float) -> Past:
    """The periods as they are drawn: the same for a quarter of an hour, unless something changes."""
    end = math.ceil(now / _STEP) * _STEP
    begin = end - _DAY
    left = [replace(it, begins=max(it.begins, begin)) for it in periods if it.ends > begin]
    return (*left[:-1], replace(left[-1], ends=float(end))) if left else ()


def drawn(past: Past, name: str, key: str, happened: Sequence[Event]) -> Html:
    """The strip with its hours and changes; one sentence where nothing changed.

    `past` is clipped, `name` the ID of the tile's element, and `happened` has the page's events about the device.
    """
    known = [it for it in past if it.state != "Unknown"]
    if not any((it.state, it.holders) != ("Healthy", ()) for it in known):
        gaps = " while Fairlead ran" if len(known) < len(past) else ""
        return h("p", f"In the last 24 hours nothing happened to it{gaps}.", class_="quiet")
    names = list(_names(past, name))
    newest = [_change(it, at, happened) for it, at in list(zip(past, names, strict=True))[: -_LISTED - 1 : -1]]
    more = len(past) - _LISTED
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
        h("p", h("strong", ", ".join(filter(None, words))), _holders(period)),
        h("p", period.message) if period.message else None,
        h("p", "Events: ", _links(events)) if events else None,
        id=name,
    )


def _holders(period: Period) -> str:
    if period.holders:
        return f", held by {', '.join(period.holders)}"
    return ", free" if period.state == "Healthy" else ""


def _links(events: Sequence[Event]) -> Html:
    return join(_between(h("a", it.kind, href=f"#e-{it.number}") for it in events))


def _between(links: Iterator[Html]) -> Iterator[str]:
    for number, link in enumerate(links):
        yield from (", ", link) if number else (link,)


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M")
