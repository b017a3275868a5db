"""What the page shows, part by part, each with the version in which it changed last.

A browser is sent the parts that are newer than its own. Nothing is queued for it: a slow one costs nothing, and misses
only states that are past.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from agent.console.http.page import sections
from agent.console.http.page.history_strip import Past, clipped
from agent.console.http.page.html import Html
from agent.console.http.page.tiles import drawn, name
from agent.console.http.page.topology import Tile, missing, tiles
from agent.console.http.page.troubles import troubles
from agent.console.views import Event, Histories, Note, Status
from agent.runtime.chunked_work import in_slices

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
            fresh = {**self._sections(status, every, happened)}
            fresh["devices"] = "".join(await in_slices(sections.devices(every, lambda _: _NOTHING)))
            shown = await in_slices(_shown(every, await self._remember(), happened, status.now))
            drawings = dict(await in_slices((name(it[0]), it) for it in shown))
            fresh |= await in_slices(self._tiles(drawings))
            self._drawn, self.tiles = drawings, every
            self._take(fresh)

    def since(self, version: int) -> dict[str, str]:
        """The parts that have changed since that version."""
        return {name: part.html for name, part in self.parts.items() if part.version > version}

    def _sections(self, status: Status, every: Sequence[Tile], happened: Sequence[Event]) -> dict[str, str]:
        found = troubles(status, every)
        return {
            "verdict": sections.verdict(status, every, found),
            "attention": sections.attention(found),
            "resources": sections.resources(status.resources, status.templates),
            "unclaimed": sections.unclaimed(status),
            "events": sections.events(happened, {it: tile.title for tile in every for it in tile.names}),
            "about": sections.about(status),
        }

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
