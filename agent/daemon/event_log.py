"""Keeps the last lines of the log as events, and streams new ones to subscribers.

A line of ours from `info` upwards is an event, whatever level is printed: nothing has to be said twice, and what is told
to the log once, when it changes, is told here once. A line may come from any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from agent.console.views import Event

KEPT: Final = 1000
"""Events that are remembered; who watches and does not keep up misses those before them."""

_LISTED: Final = 10  # of a list in a sentence
_ASIDE: Final = frozenset({"backend", "subject", "count", "then", "limit"})
"""Fields that say nothing more where there is a sentence."""

_APART: Final = frozenset({"event", "exc_info", "called", "resource", "device", "ids", "state", "message", "reason"})


class Events:
    """The newest events, and who waits for the next."""

    def __init__(
        self,
        kept: int = KEPT,
        wall: Callable[[], float] = time.time,
        lost: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begin with none; `wall` tells seconds since 1970, `lost` how many lines could not be written."""
        self.lost = lost
        self._kept: deque[Event] = deque(maxlen=kept)
        self._number = 0
        self._wall = wall
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def note(self, line: Mapping[str, Any]) -> None:
        """A line is being logged. What the log is told by libraries, which names its logger, is no event."""
        if "logger" in line:
            return
        with self._lock:
            self._number += 1
            self._kept.append(_event(self._number, self._wall(), line))
            waiting, self._waiting = self._waiting, {}
        for news, loop in waiting.items():
            with suppress(RuntimeError):  # the loop is closed: the process is ending, at any moment of another thread's
                loop.call_soon_threadsafe(news.set)

    async def watch(self, last: int, *, follow: bool) -> AsyncGenerator[Event, None]:
        """The newest `last` that are kept, then, to follow, every one as it comes."""
        seen = max(0, self._number - last)
        while True:
            for event in self._after(seen):
                seen = event.number
                yield event
            if not follow:
                return
            await self._news(seen)

    def _after(self, number: int) -> list[Event]:
        with self._lock:
            if number >= self._number:
                return []
            return list(self._kept)[number - self._number :]

    async def _news(self, seen: int) -> None:
        """Wait until there is an event after this one."""
        news = asyncio.Event()
        with self._lock:
            if self._number > seen:
                return
            self._waiting[news] = asyncio.get_running_loop()
        try:
            await news.wait()
        finally:
            with self._lock:
                self._waiting.pop(news, None)


def _event(number: int, wall: float, line: Mapping[str, Any]) -> Event:
    """Of a line with a `message`, the `reason` is a word for machines; of any other it is the sentence."""
    word, sentence = (line.get("reason", ""), line["message"]) if "message" in line else ("", line.get("reason", ""))
    device = _words(line.get("device") or line.get("ids", ""))
    said = {
        name: _words(value)
        for name, value in line.items()
        if name not in _APART and not (name in _ASIDE and (sentence or "message" in line))
    }
    more = ", ".join(f"{name} {value}" for name, value in said.items() if value not in (device, "", "None"))
    return Event(
        number,
        wall,
        str(line["event"]),
        _words(line.get("resource", "")),
        device,
        _words(line.get("state", "")),
        _words(word),
        ": ".join(part for part in (more, _words(sentence)) if part),
        _words(line.get("called", "")),
    )


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        shown = ", ".join(map(str, value[:_LISTED]))
        return shown + (f" and {len(value) - _LISTED} more" if len(value) > _LISTED else "")
    return str(value)
