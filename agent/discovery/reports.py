"""Reports the problems of a backend's units, once when each begins and once when it is over, and has the units tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import structlog

from agent.discovery.schedule import EVERY_UNIT, Schedule
from agent.discovery.unit_walk import Walk
from agent.runtime.errors import words
from agent.runtime.workers import NoWorkerError
from backends.base import Problem, Signal, Verdict
from backends.errors import ShortageError

CALL_WELL: Final = 60.0
"""Seconds without a failure after which a call that events make counts as well. They come by the thousand, and it may fail
on every other one."""

FOR_EVENTS: Final = ("affects", "signals")
"""The calls of a backend that events make."""

CALLS: Final = (*FOR_EVENTS, "watches")
"""What stands in a unit's place for problems that belong to a call."""

log = structlog.get_logger()


class Reports:
    """The problems of one backend."""

    def __init__(
        self, kind: str, schedule: Schedule, problems: Mapping[str, tuple[Problem, ...]] = MappingProxyType({})
    ) -> None:
        """Begin with problems that have been reported; `schedule` is told which units are to be tried again."""
        self.problems = dict(problems)
        """By unit, or by call (`CALLS`); `EVERY_UNIT` stands for the backend as a whole."""
        self._kind = kind
        self._schedule = schedule
        self._soon_well: dict[str, asyncio.TimerHandle] = {}

    def report(self, unit: str, problems: Iterable[Problem]) -> None:
        """Keep a unit's problems, and log those that are new, or that there are none any more."""
        before, after = self.problems.get(unit, ()), tuple(problems)
        if before == after:
            return
        if after:
            self.problems[unit] = after
            for problem in (problem for problem in after if problem not in before):
                log.warning("discovery-problem", backend=self._kind, subject=problem.subject, reason=problem.sentence)
        else:
            del self.problems[unit]
            log.info("discovery-problem-solved", backend=self._kind, subject=unit or self._kind)

    def call_failed(self, call: str, sentence: str) -> None:
        """Report a call that events make and that failed. The first sentence stays: each failure has another."""
        if (timer := self._soon_well.pop(call, None)) is not None:
            timer.cancel()
        if call not in self.problems:
            self.report(call, [Problem(call, sentence)])

    def call_answered(self, call: str) -> None:
        """Note that a call which failed before did not fail now."""
        if call in self.problems and call not in self._soon_well:
            self._soon_well[call] = asyncio.get_running_loop().call_later(CALL_WELL, self.call_is_well, call)

    def call_is_well(self, call: str) -> None:
        """End the problem of a call: it has not failed for long, or its backend is not in force any more."""
        if (timer := self._soon_well.pop(call, None)) is not None:
            timer.cancel()
        self.report(call, ())

    # --- what came of a walk ---

    def walked(self, walk: Walk, failure: Exception | None = None) -> None:
        """Report what went wrong in a walk, and what did not any more; `failure` is why the units could not be listed."""
        for unit, look in walk.looks.items():
            if look.discovery.problems or unit in self.problems:
                self._was_read(unit, look.discovery.problems)
        if walk.listed is not None:
            for unit in self.problems.keys() - walk.listed - {EVERY_UNIT, *CALLS}:
                self._was_read(unit)
        for unit, error in walk.failures.items():
            self.report(unit, [Problem(unit, cannot_read(unit, error))])
            # a shortage of ours may be over the next moment
            self._schedule.retry(unit, steady=isinstance(error, ShortageError))
        if failure is not None:
            self._fails(f"backend {self._kind} cannot list its units: {words(failure)}")
        elif walk.listed is not None and EVERY_UNIT in self.problems:
            self._was_read(EVERY_UNIT)

    def no_worker(self, error: NoWorkerError) -> None:
        """Report that there was no thread that could read."""
        self._fails(f"{error}; its devices are shown as they were last seen")

    def _fails(self, sentence: str) -> None:
        """Report a problem of the backend as a whole."""
        self.report(EVERY_UNIT, [Problem(self._kind, sentence)])
        self._schedule.retry(EVERY_UNIT)

    def _was_read(self, unit: str, problems: Iterable[Problem] = ()) -> None:
        self.report(unit, problems)
        self._schedule.is_well(unit)


def cannot_read(unit: str, error: BaseException) -> str:
    """Why a unit could not be read, in words."""
    return f"{unit} cannot be read: {words(error)}"


def hangs(unit: str, seconds: float) -> str:
    """The sentence for a unit whose read hangs, or a backend whose listing does."""
    what = f"reading {unit}" if unit else "listing its units"
    return f"{what} has hung for {seconds:g} s; it is left alone until the read returns"


def signals_of_hung(hardware: Iterable[str], why: str) -> tuple[Signal, ...]:
    """The signals that make the hardware of a unit Unhealthy whose read hangs: no pod shall get it."""
    return tuple(Signal(name, "hangs", Verdict.NOW, f"nobody knows how it is: {why}") for name in hardware)
