"""What every source hands on (hints where to look, records of what sysfs does not keep, and that some were lost), and its turns.

A source reads its file when events wait in it: at once, and in turns of 20 ms while more keep coming. A backend's own way to
hear of its hardware (`Backend.listen`) runs in a thread, which may hang; again after a failure.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, Final

import anyio
from msgspec import Struct

from agent.discovery import backend_answers
from agent.runtime.errors import words
from agent.runtime.pacing import Backoff, Credit
from agent.runtime.problems import Problems
from agent.runtime.watchdog import beating
from agent.runtime.workers import NoWorkerError, Workers
from backends.base import Backend, Heard, Hint, Host, HostPath, Record

_BOOT_ID = HostPath("/proc/sys/kernel/random/boot_id")

SILENCE: Final = 30.0
"""Seconds without a sign of life after which a thread is taken to hang, and left alone."""

_LOOK: Final = 5.0  # seconds between two looks whether it hangs
_FIRST_DELAY: Final = 1.0  # seconds before it is tried again, doubling
_MOST_DELAY: Final = 60.0  # seconds


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


# --- what a backend hears by itself ---


class Listening:
    """Listens to this hardware through a backend."""

    def __init__(
        self,
        backend: Backend[Any],
        hardware: frozenset[str],
        take: Callable[[Heard], None],
        workers: Workers,
        problems: Problems,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; `take` is told on the event loop what is heard, `workers` has threads of its own for this backend."""
        self.hardware = hardware
        self.complaint = "it is being opened"
        """Why nothing is heard, in one sentence; empty while it is."""
        self._backend = backend
        self._take = take
        self._workers = workers
        self._clock = clock
        self._last = clock()
        self._trouble = problems.trouble(
            "listening", f"{backend.hears} cannot be heard", "not-heard", "heard-again", then="it is tried again"
        )

    async def run(self) -> None:
        """Listen until cancelled. The thread ends with what it hears next, or hangs on."""
        backoff = Backoff(_FIRST_DELAY, _MOST_DELAY)
        try:
            while True:
                why = await self._listen()
                if not self.complaint:
                    backoff.reset()
                self.complaint = why
                self._trouble.report_once(why)
                await anyio.sleep(backoff.next())
        finally:
            self._trouble.healed()

    async def _listen(self) -> str:
        """Listen until that fails; returns why."""
        over, loop = threading.Event(), asyncio.get_running_loop()
        self._last = self._clock()
        try:
            job = self._workers.start(lambda: self._hear(over, loop))
        except NoWorkerError as error:
            return str(error)
        try:
            while not job.done():
                await asyncio.wait([job], timeout=_LOOK)
                if not job.done() and self._clock() - self._last >= SILENCE:
                    return f"it has given no sign of life for {SILENCE:g} s"
            failure = job.exception()
            return "it ended, which it should not" if failure is None else words(failure)
        finally:
            over.set()
            job.cancel()

    def _hear(self, over: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        """Hand on what the backend hears; in the thread."""
        with closing(self._backend.listen(self.hardware)) as every:  # type: ignore[type-var]  # a generator, mostly
            for heard in every:
                if over.is_set():
                    return
                told = backend_answers.heard(heard)
                with suppress(RuntimeError):  # the loop is closed: the process is ending
                    loop.call_soon_threadsafe(self._note, told, over)

    def _note(self, heard: Heard | None, over: threading.Event) -> None:
        if over.is_set():
            return
        self._last, self.complaint = self._clock(), ""
        self._trouble.healed()
        if heard is not None:
            self._take(heard)
