"""Draws the live page while viewers are connected, and sends each of them what it does not have yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Final

import anyio

from agent.console.control import Control
from agent.console.http.page.page_parts import Picture
from agent.console.http.responses import as_json

MOST: Final = 32
"""Pages that may be open at a time; half of all connections, so that scrapes and probes find one."""

PING: Final = 5.0
"""Seconds after which a viewer hears from us, if nothing happens; the page takes twice that for a lost connection."""

_POLL: Final = 2.0  # seconds between two looks without an event: not all that is shown has one
_COALESCE: Final = 0.2  # seconds between two looks in a burst of events
_MESSAGE_CHARACTERS: Final = 32 * 1024  # of parts, in one message


class Viewers:
    """The browsers that have the page open."""

    def __init__(self, control: Control, picture: Picture, assets: str) -> None:
        """`assets` names the page's script and style: a page that has others loads itself again."""
        self.number = 0
        self._control = control
        self._picture = picture
        self._assets = assets
        self._watched = asyncio.Event()
        self._happened = asyncio.Event()
        self._drawn = asyncio.Event()
        self._told = 0  # the version that viewers were woken for last

    async def run(self) -> None:
        """Draw the page while a browser shows it, for ever."""
        while True:
            await self._watched.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen)
                while self.number:
                    await self._look()
                self._watched.clear()
                tasks.cancel_scope.cancel()

    async def _listen(self) -> None:
        """Wake the drawing at each event."""
        async with aclosing(self._control.watch(0, follow=True)) as events:
            async for _ in events:
                self._happened.set()

    async def _look(self) -> None:
        self._happened.clear()
        await self._picture.refresh()
        if self._picture.version != self._told:  # a browser that loads the page has it drawn, too
            self._told = self._picture.version
            self._drawn.set()
            self._drawn = asyncio.Event()
        await anyio.sleep(_COALESCE)
        with anyio.move_on_after(_POLL):
            await self._happened.wait()

    async def messages(self, seen: str) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one viewer: first what it lacks, then what changes; `seen` is the last ID it had."""
        run, _, number = seen.partition("-")
        has = int(number) if run == self._picture.run and number.isdecimal() else 0
        self.number += 1
        self._watched.set()
        try:
            yield _message("hello", self._assets, "retry: 1000\n")
            while True:
                drawn, version = self._drawn, self._picture.version
                for message in self._news(has):
                    yield message
                has = version
                with anyio.move_on_after(PING):
                    await drawn.wait()
                    continue
                yield _message("ping", time.time())
        finally:
            self.number -= 1

    def _news(self, has: int) -> Iterator[bytes]:
        """What has changed since that version, in messages of limited size; only the last one has the new version."""
        picture = self._picture
        version, parts, size = picture.version, dict[str, str](), 0
        for name, html in picture.since(has).items():
            parts[name] = html
            size += len(html)
            if size >= _MESSAGE_CHARACTERS:
                yield _message("parts", parts)
                parts, size = {}, 0
        if version > has:
            yield _message("parts", parts, f"id: {picture.run}-{version}\n")


def _message(kind: str, data: object, more: str = "") -> bytes:
    return b"%sevent: %s\ndata: %s\n\n" % (more.encode(), kind.encode(), as_json(data))
