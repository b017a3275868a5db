"""The page: one document with its style and script in it, which nothing else may be added to, and which works without.

Its policy allows exactly that style and that script, by their hashes, and a connection back to us.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from agent.console.http import sections
from agent.console.http.html import Html, h
from agent.console.http.sections import troubles
from agent.console.http.tiles import Past, clipped, drawn, name
from agent.console.http.topology import Tile, missing, tiles
from agent.console.sockets import node_name
from agent.console.views import Event, Histories, Note, Status
from agent.runtime.workers import in_slices

_STYLE: Final = Html(Path(__file__).with_name("page.css").read_text())
_SCRIPT: Final = Html(Path(__file__).with_name("page.js").read_text())
_ICON: Final = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='3' fill='%23456'/%3E"
    "%3Cpath d='M4 13V3h8M4 8h6' fill='none' stroke='%23fff' stroke-width='2'/%3E%3C/svg%3E"
)
_SECTIONS: Final = (
    ("attention", "Attention", "Needs attention"),
    ("devices", "Devices", "Devices in their place"),
    ("resources", "Resources", "Resources"),
    ("events", "Events", "Recent events"),
    ("unclaimed", "Others", "Found, and meant for no resource"),
)


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash(_STYLE)}",
        f"script-src {_hash(_SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy."""

ASSETS: Final = hashlib.sha256((_STYLE + _SCRIPT).encode()).hexdigest()[:12]
"""Names the style and script; after an update, an open page notices that it is an old one."""


def document(picture: Picture) -> Iterator[str]:
    """The page as it is now, in pieces; it may be drawn again before the last of them is asked for."""
    parts, tiles, seen = picture.parts, picture.tiles, f"{picture.run}-{picture.version}"
    yield f'<!doctype html>\n<html lang="en">{_head()}'
    yield f'<body data-assets="{ASSETS}" data-seen="{seen}">{_top()}'
    yield f'<main id="main">{h("div", Html(parts["verdict"].html), id="verdict", aria_live="polite")}'
    for part, _, title in _SECTIONS:
        yield f'<section class="{part}" aria-labelledby="{part}-title"><h2 id="{part}-title" tabindex="-1">{title}</h2>'
        yield f'<div id="{part}">'
        if part == "devices":
            yield from sections.devices(tiles, lambda tile: Html(parts[name(tile)].html))
        else:
            yield parts[part].html
        yield "</div></section>"
    yield f'</main><footer><div id="about">{parts["about"].html}</div>{_links()}</footer></body></html>\n'


def _head() -> Html:
    return h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", "Fairlead"),
        h("link", rel="icon", href=_ICON),
        h("style", _STYLE),
        h("noscript", h("meta", http_equiv="refresh", content="30")),
        h("script", _SCRIPT, type="module"),
    )


def _top() -> Html:
    return h(
        "header",
        h("a", "Skip to what needs attention", href="#attention-title", class_="skip"),
        h("h1", "Fairlead", h("span", node_name(), id="host")),
        h("p", "Not live: that takes JavaScript. It loads itself again every 30 s.", id="live", role="status"),
        h("nav", [h("a", short, href=f"#{name}-title") for name, short, _ in _SECTIONS], aria_label="Sections"),
    )


def _links() -> Html:
    paths = ("metrics", "status.json", "healthz", "readyz")
    return h("p", [h("a", f"/{path}", href=path) for path in paths], class_="links")


# --- its parts, each with the version in which it changed last ---
#
# A browser is sent the parts that are newer than its own. Nothing is queued for it: a slow one costs nothing, and misses
# only states that are past.


EVENTS: Final = 50
"""How many the page shows."""

_NOTHING: Final = Html("")


class Part(Struct, frozen=True):
    """One part of the page: what is in the element of that name."""

    html: str
    version: int


_Shown = tuple[Tile, Past, tuple[Event, ...], tuple[Note, ...]]
"""What a tile is drawn of: the device, how it was, the events about it, and what happened to its hardware beside."""


class Picture:
    """The parts as they are now; `refresh` draws what has changed."""

    def __init__(
        self,
        look: Callable[[], Awaitable[Status]],
        recall: Callable[[], Awaitable[Sequence[Event]]],
        remember: Callable[[], Awaitable[Histories]],
    ) -> None:
        """`recall` has the newest `EVENTS` events, `remember` how devices were."""
        self.run = secrets.token_hex(4)
        """Tells the versions of this run from those of an earlier one."""
        self.version = 0
        self.parts: dict[str, Part] = {}
        """By the names of the elements that hold them; tiles come after the section that they are in."""
        self.tiles: Sequence[Tile] = ()
        self._look = look
        self._recall = recall
        self._remember = remember
        self._drawn: dict[str, _Shown] = {}  # what each tile among the parts is drawn of
        self._drawing = asyncio.Lock()

    async def refresh(self) -> None:
        """Draw what has changed."""
        async with self._drawing:
            status, happened = await self._look(), await self._recall()
            every = await in_slices(_every(status))
            fresh = dict(await in_slices(self._sections(status, every, happened)))
            fresh["devices"] = "".join(await in_slices(sections.devices(every, lambda _: _NOTHING)))
            shown = await in_slices(_shown(every, await self._remember(), happened, status.now))
            drawings = dict(await in_slices((name(it[0]), it) for it in shown))
            fresh |= await in_slices(self._tiles(drawings))
            self._drawn, self.tiles = drawings, every
            self._take(fresh)

    def since(self, version: int) -> dict[str, str]:
        """The parts that have changed since that version."""
        return {name: part.html for name, part in self.parts.items() if part.version > version}

    def _sections(self, status: Status, every: Sequence[Tile], happened: Sequence[Event]) -> Iterator[tuple[str, str]]:
        found = troubles(status, every)
        yield "about", sections.about(status)  # first, so that `found` has a step of the loop for itself
        yield "verdict", sections.verdict(status, every, found)
        yield "attention", sections.attention(found)
        yield "resources", sections.resources(status.resources, status.templates)
        yield "unclaimed", sections.unclaimed(status)
        told = {it for event in happened for it in (event.device, *event.device.split(", "))}
        titles = {it: tile.title for tile in every for it in tile.names if it in told}
        yield "events", sections.events(happened, titles)

    def _tiles(self, every: Mapping[str, _Shown]) -> Iterator[tuple[str, str]]:
        for it, shown in every.items():
            yield it, self.parts[it].html if self._drawn.get(it) == shown else str(drawn(*shown))

    def _take(self, fresh: dict[str, str]) -> None:
        before, following = self.parts, self.version + 1
        self.parts = {
            name: known
            if (known := before.get(name)) is not None and known.html == html
            else Part(str(html), following)
            for name, html in fresh.items()
        }
        if any(part.version == following for part in self.parts.values()):
            self.version = following


def _every(status: Status) -> Iterator[Tile]:
    for one in status.resources:
        yield from tiles(one.name, one.devices)
    yield from missing(status.unclaimed)


def _shown(every: Sequence[Tile], known: Histories, happened: Sequence[Event], now: float) -> Iterator[_Shown]:
    others = {(it.resource, it.key): it.periods for it in known.others}
    plain = clipped(known.plain, now)
    beside: dict[str, list[Note]] = {}
    for note in known.notes:
        beside.setdefault(note.hardware, []).append(note)
    about: dict[str, list[Event]] = {}
    for event in happened:
        about.setdefault(event.device, []).append(event)
    for tile in every:
        told = tuple(event for it in sorted(tile.names) for event in about.get(it, ()))
        notes = [note for it in tile.beneath for note in beside.get(it, ())] if beside else []
        noted = tuple(sorted(notes, key=lambda it: it.time))
        if (periods := others.get((tile.resource, tile.key))) is not None:
            yield tile, clipped(periods, now), told, noted
        else:
            yield tile, () if tile.missing else plain, (), noted
