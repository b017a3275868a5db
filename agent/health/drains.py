"""Takes hardware out of service: for an operator, who drains it, and in quarantine, where it flaps.

A drain has a reason, and lasts for a time or until further notice; `daemon/state_file.py` has it on disk. Hardware that keeps
failing and recovering, or going and coming back, stays Unhealthy for a while: its list would be sent, and its log line written,
with each change; and a pod that got it would lose it soon. Each further quarantine is twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from agent.health.causes import WINDOW
from agent.model import HEALTHY, Health, State

LOOK_AGAIN: Final = 60.0
"""Seconds after which a drain's end is compared with the wall clock again: that clock may have been set."""


class Drain(Struct, frozen=True):
    """One piece of hardware that an operator has taken out of service."""

    hardware: str
    reason: str
    """The operator's words."""
    since: float
    """Seconds since the epoch; a drain outlives boots, and its end is a person's appointment."""
    until: float | None = None
    """Seconds since the epoch; None: until it is undrained."""

    def is_over(self, wall: float) -> bool:
        """Whether its end has come."""
        return self.until is not None and self.until <= wall

    def deadline(self, now: float, wall: float) -> float | None:
        """When to look at the wall clock again, in monotonic seconds; later than now."""
        if self.until is None:
            return None
        return max(now + min(self.until - wall, LOOK_AGAIN), math.nextafter(now, math.inf))

    def told(self) -> str:
        """A sentence for an operator who drains it again."""
        until = f" until {moment(self.until)}" if self.until is not None else ""
        return f"drained since {moment(self.since)}{until}: {self.reason or 'no reason was given'}"

    def sentence(self, besides: Health) -> str:
        """What a person is told, who must also see what else is the matter."""
        why = f": {self.reason.rstrip('.')}" if self.reason else ""
        until = f", until {moment(self.until)}" if self.until is not None else ""
        if besides.state is State.HEALTHY:
            return f"an operator drained it{why}{until}"
        other = f"besides, it is {besides.state.value} with {besides.reason} ({besides.message.rstrip('.')})"
        return f"an operator drained it{why}{until}; {other}"


# --- quarantine of what keeps failing, or going and coming back ---


FAILURES: Final = 5
"""How often hardware may become Unhealthy, or come back, within `WINDOW` before it is quarantined. A person who pulls a
cable or a card, looks and plugs it in again does it twice or three times."""

FIRST: Final = 60.0
"""Seconds that the first quarantine lasts: a switch that restarts has its ports up again within."""

LONGEST: Final = 3600.0
"""Seconds that a quarantine lasts at most, after it doubled six times: what was repaired overnight is back by itself."""

FORGOTTEN_AFTER: Final = 6 * 3600.0
"""Seconds after a quarantine's end until the next one is a first one again."""


class Drains:
    """Every drain that there is."""

    def __init__(self) -> None:
        self._drains: dict[str, Drain] = {}
        self.revision = 0
        """Raised whenever they change: they outlive a restart."""

    def __contains__(self, hardware: object) -> bool:
        return hardware in self._drains

    def of(self, hardware: str) -> Drain | None:
        """The drain that this piece is under."""
        return self._drains.get(hardware)

    def all(self) -> tuple[Drain, ...]:
        """Each of them."""
        return tuple(self._drains.values())

    def drain(self, hardware: Iterable[str], reason: str, until: float | None, wall: float) -> None:
        """Drain these; what is drained already gets another reason and end, and keeps its begin."""
        for name in hardware:
            since = before.since if (before := self._drains.get(name)) is not None else wall
            self._drains[name] = Drain(name, reason, since, until)
        self.revision += 1

    def undrain(self, hardware: Iterable[str]) -> set[str]:
        """End the drains of these; returns what was drained."""
        drained = {name for name in hardware if self._drains.pop(name, None) is not None}
        self.revision += len(drained)
        return drained

    def let_end(self, hardware: str, wall: float) -> None:
        """End the drain of this piece, if its time has come."""
        if (drain := self._drains.get(hardware)) is not None and drain.is_over(wall):
            self.undrain([hardware])

    def replace_all(self, drains: Iterable[Drain]) -> None:
        """Have these in place of all others."""
        self._drains = {drain.hardware: drain for drain in drains}


class Quarantine(Struct, frozen=True):
    """One quarantine, over or not. The last one is remembered for its length."""

    hardware: str
    times: int
    """How many there were in a row, this one included."""
    since: float
    until: float
    """Monotonic seconds of the boot in which it began."""
    message: str

    def lasts(self, now: float) -> bool:
        """Whether it is not over yet."""
        return now < self.until

    def deadline(self, now: float) -> float:
        """When time alone will end it, or have it forgotten."""
        return self.until if self.lasts(now) else self.until + FORGOTTEN_AFTER

    def is_forgotten(self, now: float) -> bool:
        """Whether it was so long ago that it says nothing about the next one."""
        return self.until + FORGOTTEN_AFTER <= now


class _Failures(Struct, frozen=True):
    """How often hardware became Unhealthy or came back lately, with never more than a `WINDOW` in between."""

    first: float
    last: tuple[float, ...] = ()
    """The last `FAILURES` of either."""
    count: int = 0
    """How often it became Unhealthy."""
    returns: int = 0
    """How often it went away and came back."""
    cause: Health = HEALTHY
    """What made it Unhealthy, the last time."""

    def are_too_many(self, now: float) -> bool:
        return len(self.last) == FAILURES and now - self.last[0] <= WINDOW

    def words(self, now: float) -> str:
        became = f"became Unhealthy {times(self.count)}" if self.count else ""
        came = f"went away and came back {times(self.returns)}" if self.returns else ""
        what = f"{' and '.join(filter(None, (became, came)))} in {span(now - self.first)}"
        if not self.count:
            return what
        last = "Unhealthy last" if came else "the last time"
        return f"{what}, {last} with {self.cause.reason} ({self.cause.message.rstrip('.')})"


class Flapping:
    """Counts failures and decides on quarantine."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failures] = {}
        self._quarantines: dict[str, Quarantine] = {}

    def count(self, hardware: str, now: float, cause: Health | None = None) -> None:
        """The hardware became Unhealthy, for this cause; without one, it is back after it had gone. Once for each moment."""
        known = self._failures.get(hardware)
        if known is None or now - known.last[-1] > WINDOW:
            known = _Failures(now)
        if now in known.last:
            return
        known = replace(known, last=(*known.last, now)[-FAILURES:])
        if cause is None:
            self._failures[hardware] = replace(known, returns=known.returns + 1)
        else:
            self._failures[hardware] = replace(known, count=known.count + 1, cause=cause)

    def judge(self, hardware: str, now: float, wall: float) -> bool:
        """Let time pass: quarantine begins, is renewed or ends, is forgotten; returns whether that is a change.

        Args:
            hardware: whose.
            now: monotonic seconds.
            wall: seconds since the epoch at that time, for the sentence.
        """
        known, failures = self._quarantines.get(hardware), self._failures.get(hardware)
        if known is not None and known.lasts(now):
            return False
        if forgotten := known is not None and known.is_forgotten(now):
            del self._quarantines[hardware]
            known = None
        if failures is None or not failures.are_too_many(now):
            return forgotten
        number = known.times + 1 if known else 1
        self._quarantines[hardware] = _quarantine(hardware, number, failures, now, wall)
        del self._failures[hardware]  # failures during quarantine are counted from 0: they decide on the next one
        return True

    def of(self, hardware: str) -> Quarantine | None:
        """The last quarantine of this hardware that is remembered, over or not."""
        return self._quarantines.get(hardware)

    def all(self) -> list[Quarantine]:
        """Every quarantine that is remembered."""
        return list(self._quarantines.values())

    def replace_all(self, quarantines: Iterable[Quarantine]) -> None:
        """Have these remembered and no others."""
        self._quarantines = {quarantine.hardware: quarantine for quarantine in quarantines}

    def forget(self, hardware: str) -> bool:
        """A person says that the hardware is well; returns whether there was a quarantine to remember."""
        self._failures.pop(hardware, None)
        return self._quarantines.pop(hardware, None) is not None


def _quarantine(hardware: str, number: int, failures: _Failures, now: float, wall: float) -> Quarantine:
    lasts = min(FIRST * 2 ** (number - 1), LONGEST)
    message = f"it {failures.words(now)}; it is left out for {span(lasts)}, until {moment(wall + lasts)}"
    return Quarantine(hardware, number, now, now + lasts, message)


# --- times and numbers in sentences ---


def span(seconds: float) -> str:
    """A duration, rounded up to what one says: `45 s`, `9 min`, `2 h`."""
    whole = max(1, -int(-seconds // 1))
    if whole < 120:
        return f"{whole} s"
    return f"{-(-whole // 60)} min" if whole < 7200 else f"{-(-whole // 3600)} h"


def moment(wall: float) -> str:
    """A moment, in UTC: a node's log and its operator may be in two time zones."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def times(number: int) -> str:
    """How often: `once`, `twice`, `5 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
