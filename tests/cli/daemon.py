"""A made-up daemon behind a real admin socket, in a thread, for commands that have a loop of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.console.service import served
from tests.console.fakes import FakeDaemon
from tests.wait import PATIENCE


@contextmanager
def running(daemon: FakeDaemon, socket: Path) -> Iterator[None]:
    """Serve until the context ends."""
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        async with served(daemon, socket):
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        yield
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(PATIENCE)
        loop.close()
