"""Checks that every part of the daemon is alive, and feeds systemd's watchdog only then; HTTP's /healthz asks too."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import anyio

from agent.runtime.supervision.notify import Notifier
from agent.runtime.supervision.problems import Problems

BEAT: Final = 10.0
"""Seconds between two signs of life of a part that has nothing to do."""
SILENCE: Final = 30.0
"""Seconds without one after which a part counts as dead: it hangs, or its task is gone."""
FAILING: Final = 300.0
"""Seconds for which a part may fail with errors of ours, and be started again, before it counts as dead."""
RECOVERED: Final = 60.0
"""Seconds without a failure after which a part counts as well again; twice what it waits at most for its next start."""

_LATE: Final = 1.0  # seconds by which a look may be late before it counts as time in which the process stood still
_CHECK: Final = 10.0  # seconds between two looks where systemd asks for none

_Result = TypeVar("_Result")


async def beating(wait: Callable[[], Awaitable[_Result]], beat: Callable[[], None]) -> _Result:
    """Wait, with a sign of life every `BEAT` seconds.

    Args:
        wait: is called anew after each; whatever it waits for must still be there then.
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
