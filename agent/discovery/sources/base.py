"""What every source hands on (hints where to look, records of what sysfs does not keep, and that some were lost), and its turns.

A source reads its file when events wait in it: at once, and in turns of 20 ms while more keep coming.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from agent.runtime.pacing import Credit
from agent.runtime.watchdog import beating
from backends.base import Hint, Host, HostPath, Record

_BOOT_ID = HostPath("/proc/sys/kernel/random/boot_id")


class Resync(Struct, frozen=True):
    """Hints were lost: look at everything again."""

    reason: str
    """One sentence for the log."""


Emitted = Hint | Record | Resync

Emit = Callable[[Emitted], None]
"""Takes what a source hands on, on the event loop; it must not block."""

Beat = Callable[[], None]
"""A sign of life, which a source gives at least every `agent.runtime.watchdog.BEAT` seconds."""


def unwatched() -> None:
    """A `Beat` for a source that no watchdog watches."""


def boot_id(host: Host) -> str:
    """The ID of the machine's boot (random(4)), "" if it cannot be read. procfs makes the text, so that nothing blocks."""
    try:
        return host.local(_BOOT_ID).read_text().strip()
    except OSError:
        return ""


# --- reading in turns ---


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
