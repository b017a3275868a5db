"""Serves the page of a made-up node, and opens it as an operator does, minding all that the browser complains of."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any, Final, Protocol

from playwright.sync_api import Browser, ConsoleMessage, Page

from agent.console.http.serving import serve
from agent.console.views import Event, Status
from agent.runtime.counts import Counts
from tests.console.fakes import FakeDaemon
from tests.console.http import nodes
from tests.console.http.serving import Health, free_port, is_listening
from tests.wait import PATIENCE, block_until

MILLISECONDS: Final = PATIENCE * 1000


def well() -> Status:
    return nodes.node(nodes.gpus())


def fallen() -> Status:
    return nodes.node(nodes.gpus(**nodes.FALLEN))


class Node:
    """A made-up node, of whose GPUs one has fallen off the bus; it serves its page from a thread."""

    def __init__(self) -> None:
        past = {nodes.gpu(3).key: nodes.PAST}
        self.daemon = FakeDaemon(shown=fallen(), events=list(nodes.EVENTS), plain=nodes.UNCHANGED, past=past)
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._serving: asyncio.Task[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        block_until(lambda: is_listening(self.port), "the page is served")

    def _serve(self) -> None:
        async def serving() -> None:
            await serve(self.daemon, Health(), Counts(), f"127.0.0.1:{self.port}")

        self._serving = self._loop.create_task(serving())
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)

    def stop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join(PATIENCE)
            self._thread = None

    def close(self) -> None:
        self.stop()
        self._loop.close()

    def show(self, status: Status, *events: Event) -> None:
        """The node is like this from now on, and says so."""

        def happen() -> None:
            self.daemon.shown = status
            self.daemon.events += events
            for event in events or nodes.EVENTS[:1]:
                self.daemon.news.put_nowait(event)

        self._loop.call_soon_threadsafe(happen)


class Served(Protocol):
    """Whoever serves a page."""

    @property
    def url(self) -> str:
        """Where the page is, to its last slash."""


class Visit:
    """An operator in front of the page, and everything that the browser complains of."""

    def __init__(self, browser: Browser, node: Served, *, manual_clock: bool = False, **about: Any) -> None:
        """Go there; with a manual clock, time passes on the page when the test says so."""
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.loads = 0
        self.page: Page = browser.new_page(**about)
        self.page.set_default_timeout(MILLISECONDS)
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url, node.url))
        self.page.on("load", self._loaded)
        if manual_clock:
            self.page.clock.install(time=nodes.NOW)
            self.page.clock.pause_at(nodes.NOW + 3600)
        self.page.goto(node.url)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, url: str, ours: str) -> None:
        if not url.startswith((ours, "data:")):
            self.elsewhere.append(url)

    def _loaded(self, _page: Page) -> None:
        self.loads += 1

    def leave(self) -> None:
        self.page.close()
        assert (self.complaints, self.elsewhere) == ([], [])
