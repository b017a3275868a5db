"""Reads a source's file when events wait in it: at once, and in turns of 20 ms while more keep coming."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from agent.discovery.sources.base import Beat
from agent.runtime.pacing import Credit
from agent.runtime.supervision.watchdog import beating

AT_ONCE: Final = 8
"""Reads that need not wait: one change often comes as several events."""

TURN: Final = 0.02
"""Seconds between two reads after those: all events that came meanwhile cost one scan instead of one each."""


async def read_in_turns(file: int, receive: Callable[[], bool], beat: Beat) -> None:
    """Have the file read whenever something waits in it, until cancelled.

    Args:
        file: the descriptor; it does not block.
        receive: reads one batch, and tells whether more may be waiting: then it is called again in the loop's next turn.
        beat: is given a sign of life.

    Raises:
        Exception: whatever `receive` raises.
    """
    # no wait_readable: a task that is woken for each event takes 0.1 ms longer
    loop, credit = asyncio.get_running_loop(), Credit(AT_ONCE, TURN)
    failed: asyncio.Future[None] = loop.create_future()

    def read() -> None:
        try:
            if receive():
                return
        except Exception as error:  # noqa: BLE001  # raised below
            loop.remove_reader(file)
            failed.set_exception(error)
            return
        if (wait := credit.spend(loop.time())) > 0:
            loop.remove_reader(file)
            loop.call_later(wait, listen)

    def listen() -> None:
        if not failed.done():
            loop.add_reader(file, read)

    listen()
    try:
        await beating(lambda: asyncio.wait([failed]), beat)  # which, cancelled, leaves it as it is
        failed.result()
    finally:
        failed.cancel()
        loop.remove_reader(file)
