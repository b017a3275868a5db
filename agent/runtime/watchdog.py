"""Keeps every part of the daemon alive: restarts one that failed, a little later each time, and watches for signs of life.

systemd is told how the service is doing, as sd_notify(3) does, and its watchdog is fed only while all is alive; HTTP's /healthz
asks too. Without systemd nothing is told.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Self, TypeVar

import anyio
import structlog
from msgspec import Struct

from agent.runtime.errors import words
from agent.runtime.pacing import Backoff
from agent.runtime.problems import Problems

BEAT: Final = 10.0
"""Seconds between two signs of life of a part that has nothing to do."""
SILENCE: Final = 30.0
"""Seconds without one after which a part counts as dead: it hangs, or its task is gone."""
FAILING: Final = 300.0
"""Seconds for which a part may fail with errors of ours, and be started again, before it counts as dead."""
RECOVERED: Final = 60.0
"""Seconds without a failure after which a part counts as well again; twice what it waits at most for its next start."""

_FIRST_DELAY: Final = 0.1  # seconds before a part that failed is started again, doubling
_MOST_DELAY: Final = 30.0  # seconds
_SETTLED_AFTER: Final = 60.0  # seconds after which a part that ran counts as healthy again
_FADES: Final = _SETTLED_AFTER + _MOST_DELAY  # seconds without a failure after which the faces show none
_LATE: Final = 1.0  # seconds by which a look may be late before it counts as time in which the process stood still
_CHECK: Final = 10.0  # seconds between two looks where systemd asks for none

_Result = TypeVar("_Result")

log = structlog.get_logger()


# --- a part that fails ---


async def supervise(
    part: str, run: Callable[[], Awaitable[None]], pulse: Pulse | None = None, problems: Problems | None = None
) -> None:
    """Run a part for ever, and again when it ends or fails. `pulse` hears of each failure, and so does `problems`.

    Cancellation, and whatever else is no `Exception`, goes through.
    """
    backoff = Backoff(_FIRST_DELAY, _MOST_DELAY)
    trouble = (problems or Problems()).trouble(
        "restarts", f"{part} fails and is started again", "part-restarts", level="error", fades=_FADES, part=part
    )
    while True:
        began, ours = time.monotonic(), True
        try:
            await run()
            failure = "it ended, which it should not"
        except Exception as error:  # of any part, whatever it is; an ExceptionGroup too
            failure, ours = _words(error), not _is_systems(error)
            if ours and not trouble.is_known(failure):
                log.exception("part-failed", part=part)  # with its traceback
        if time.monotonic() - began >= _SETTLED_AFTER:
            backoff.reset()
            trouble.healed()
        trouble.report_once(failure)
        delay = backoff.next()
        if pulse is not None:
            pulse.failed(delay, ours=ours)
        await anyio.sleep(delay)


def _is_systems(error: BaseException) -> bool:
    """Whether an error is one of the system alone, and none of ours."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_systems(inner) for inner in error.exceptions)
    return isinstance(error, OSError)


def _words(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_words(inner) for inner in error.exceptions)
    return words(error) if str(error) else type(error).__name__


# --- a part that is silent ---


async def beating(wait: Callable[[], Awaitable[_Result]], beat: Callable[[], None]) -> _Result:
    """Wait, with a sign of life every `BEAT` seconds.

    Args:
        wait: is called again after each; what it waits for must still be there then.
        beat: the sign.
    """
    while True:
        beat()
        with anyio.move_on_after(BEAT):
            return await wait()


class Pulse:
    """The signs of life and the failures of one part."""

    def __init__(self, part: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.part = part
        self._clock = clock
        self._last = clock()
        self._due = self._last + SILENCE
        self._failing_since: float | None = None
        self._failed = 0.0

    def beat(self) -> None:
        """Show a sign of life."""
        self._last = self._clock()
        self._due = self._last + SILENCE

    def failed(self, delay: float, *, ours: bool) -> None:
        """Note that it failed and is started again after so many seconds.

        Args:
            delay: until then nothing is heard of it.
            ours: whether it is an error of ours, which a fresh process may not make; what the system refuses to this
                process it would refuse to the next.
        """
        self.beat()
        self._due += delay
        if not ours or self._is_well():
            self._failing_since = self._last if ours else None
        self._failed = self._last

    def stood_still(self, seconds: float) -> None:
        """Leave out so many seconds, in which the whole process did not run: it was stopped, or its machine was."""
        self._due += seconds
        self._failed += seconds
        if self._failing_since is not None:
            self._failing_since += seconds

    def _is_well(self) -> bool:
        return self._failing_since is None or self._clock() - self._failed >= RECOVERED

    def problem(self) -> str:
        """Why it counts as dead, in one sentence; empty while it is alive."""
        now = self._clock()
        if now > self._due:
            return f"{self.part} has shown no sign of life for {now - self._last:.0f} s"
        if not self._is_well() and self._failed - (self._failing_since or 0.0) >= FAILING:
            return f"{self.part} has failed again and again for {now - (self._failing_since or 0.0):.0f} s"
        return ""


class Watchdog:
    """Checks every pulse, and that the event loop turns."""

    def __init__(
        self, notifier: Notifier, clock: Callable[[], float] = time.monotonic, problems: Problems | None = None,
        lateness: Callable[[float], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """Prepare; `lateness` is told at each look how many seconds late it comes."""
        self._notifier = notifier
        self._lateness = lateness
        self._clock = clock
        self._interval = _CHECK if notifier.watchdog is None else notifier.watchdog / 3
        self._turned = clock()
        self._thread: int | None = None
        self._pulses: list[Pulse] = []
        self._dead = (problems or Problems(clock)).trouble(
            "watchdog", "a part of Fairlead shows no sign of life", "not-alive", "alive-again",
            level="error", then=self._threat(),
        )  # fmt: skip

    def pulse(self, part: str) -> Pulse:
        """The pulse of a part, which has to show signs of life from now on."""
        pulse = Pulse(part, self._clock)
        self._pulses.append(pulse)
        return pulse

    def alive(self) -> str:
        """What is not alive, in one sentence; empty while all is. Any thread may ask."""
        if threading.get_ident() == self._thread:
            self._turn()  # the look that is due may come later than this
        stalled = self._clock() - self._turned
        if stalled > self._interval + SILENCE:
            return f"the event loop has not turned for {stalled:.0f} s"
        return "; ".join(problem for pulse in self._pulses if (problem := pulse.problem()))

    async def run(self) -> None:
        """Feed systemd's watchdog for ever, three times in its period."""
        self._thread = threading.get_ident()
        while True:
            self.look()
            due = self._clock() + self._interval
            await anyio.sleep(self._interval)
            self._lateness(max(0.0, self._clock() - due))

    def look(self) -> None:
        """Feed systemd's watchdog if all is alive; else report once what is not."""
        self._turn()
        if not (complaint := self.alive()):
            self._notifier.feed()
            self._dead.healed()
        elif not self._dead.lasts:  # its seconds count up
            self._dead.report_once(complaint)

    def _turn(self) -> None:
        """Note that the event loop turns; time in which the process stood still counts against no part."""
        now = self._clock()
        if (late := now - self._turned - self._interval) > _LATE:
            for pulse in self._pulses:
                pulse.stood_still(late)
        self._turned = now

    def _threat(self) -> str:
        if self._notifier.watchdog is None:
            return "/healthz says so"
        return f"systemd restarts the service {self._notifier.watchdog:g} s after its watchdog was fed last"


# --- systemd ---


class Notifier(Struct, frozen=True):
    """Speaks to one notification socket; it never raises and never waits."""

    address: str | None
    """A path, or a name in the abstract namespace after `@`; None: no process listens."""
    watchdog: float | None = None
    """Seconds within which systemd wants to be told that we are alive (WatchdogSec=); None: it does not ask."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, pid: int | None = None) -> Self:
        """The one that systemd names in NOTIFY_SOCKET.

        WATCHDOG_USEC counts if WATCHDOG_PID is this process or missing (sd_watchdog_enabled(3)).
        """
        microseconds = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID") in (None, "", str(os.getpid() if pid is None else pid))
        asked = ours and microseconds.isdecimal() and int(microseconds) > 0
        return cls(environment.get("NOTIFY_SOCKET") or None, int(microseconds) / 1e6 if asked else None)

    def ready(self, status: str) -> None:
        """The start, or a reload, is over."""
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """What the service is doing, for `systemctl status`."""
        self._send(f"STATUS={_one_line(status)}")

    def reloading(self) -> None:
        """A reload has begun; `ready` ends it."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000  # which Type=notify-reload wants
        self._send(f"RELOADING=1\nMONOTONIC_USEC={microseconds}\nSTATUS=reading the configuration again")

    def feed(self) -> None:
        """We are alive; nothing is said where systemd does not ask."""
        if self.watchdog is not None:
            self._send("WATCHDOG=1")

    def main_process(self, pid: int) -> None:
        """Another process is the service's main one from now on; it speaks for it."""
        self._send(f"MAINPID={pid}")

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1\nSTATUS=stopping")

    def _send(self, message: str) -> None:
        if self.address is None:
            return
        name = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(message.encode(errors="replace"), name)
        except (OSError, ValueError):
            pass  # systemd is gone or busy; the service goes on without it


def _one_line(text: str) -> str:
    return " ".join(text.split())
