"""Reads and probes units in threads, one job for each unit: a unit that is slow, or hangs, is a job that is not done yet.

A thread does one job after the other. Where one is slow, it is left to its thread, and another thread goes on with the
rest. What backends answer is checked here, so that nonsense is a failure of the unit it came from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from agent.discovery import backend_answers
from agent.discovery.unit_state import UnitState
from agent.runtime.running_time import STEP, Running
from agent.runtime.supervision import resource_shortage
from agent.runtime.workers import Workers
from backends.base import Backend, Signal, Verdict

T = TypeVar("T")

UNIT_DEADLINE: Final = 5.0
"""Seconds after which a read is taken to hang."""

SLOW_AFTER: Final = 0.1
"""Seconds after which a read is slow: the other units do not wait for it any longer."""

EVERY_UNIT: Final = ""
"""In place of a unit's name: the backend as a whole, whose units are listed."""


# --- one unit, in a thread ---


def read(backend: Backend[Any], unit: str, before: UnitState) -> UnitState:
    """Read a unit and probe its devices.

    Raises:
        Exception: whatever the backend raises, or a NonsenseError.
    """
    found = backend_answers.discovery(backend.discover(unit), unit)
    signals = backend_answers.probed(backend, found.devices)
    # compared in the thread: 10,000 comparisons take 25 ms; equal ones need not be kept twice
    devices = before.devices if found.devices == before.devices else found.devices
    links = before.links if found.links == before.links else found.links
    if devices is not before.devices or found.problems or _is_ill(signals):
        resource_shortage.check()
    return UnitState(devices, links, found.beside, found.problems, signals)


def probe(backend: Backend[Any], before: UnitState, *, at_a_glance: bool) -> UnitState:
    """Probe a unit's known devices, and read nothing else. The signals are other ones if they differ, or have a measure.

    Args:
        backend: the one that is asked.
        before: what is known of it.
        at_a_glance: leave it out if it is well and a glance shows nothing new. How one that is ill recovers need not show.

    Raises:
        Exception: whatever the backend raises, or a NonsenseError.
    """
    glance = tuple(backend.glance(device) for device in before.devices)
    if at_a_glance and glance == before.glance and not _is_ill(before.signals):
        return before
    signals = backend_answers.probed(backend, before.devices)
    if _is_ill(signals):
        resource_shortage.check()
    is_new = signals != before.signals or any(signal.measure is not None for signal in signals)
    return replace(before, signals=signals if is_new else before.signals, glance=glance)


def _is_ill(signals: Iterable[Signal]) -> bool:
    return any(signal.verdict in (Verdict.NOW, Verdict.DELAYED) and signal.measure is None for signal in signals)


# --- many units ---


class Job(Struct, Generic[T], eq=False):
    """What is to be done with one unit. Its thread writes what came of it, the loop reads that."""

    unit: str
    probes: bool = False
    """Are its devices only probed?"""
    hinted: float | None = None
    """When the first hint came that led to it; None: a timer did."""
    since: float = 0.0
    """When it began."""
    done: bool = False
    result: T | None = None
    error: BaseException | None = None
    """What it raised."""
    running: Running | None = None
    """Counts the time of it in which this process did not run; the loop's, once it has looked at the job."""
    hangs: bool = False
    stale: bool = False
    """The unit is to be looked at again once it is done: it began before somebody asked for that."""
    is_gone: bool = False
    """There is no such unit any more, by a listing that came after it began."""
    thread: asyncio.Future[None] | None = None
    """Done when the thread that it was left to comes back."""

    def lasts(self, now: float) -> float:
        """Seconds since it began in which this process ran; to be asked every `STEP` seconds."""
        if self.running is None:
            self.running = Running(self.since)
        return now - self.since - self.running.missed(now)

    def fresh(self) -> Job[T]:
        """The same, not begun: the thread that was left with the one before it may have begun this one."""
        return Job(self.unit, self.probes, self.hinted)


class _Turn(Struct):
    """A thread's way through its jobs: it writes where it is, the loop whether it is to stop there."""

    at: int = 0
    over: bool = False


def _work(
    jobs: Sequence[Job[T]], do: Callable[[str], T], turn: _Turn, stop: Callable[[], bool], clock: Callable[[], float]
) -> None:
    for turn.at, job in enumerate(jobs):
        try:
            job.result = do(job.unit)
        except BaseException as error:  # noqa: BLE001  # reported with the unit's name; this thread is ours alone
            job.error = error
        job.done = True
        if turn.over or stop() or job is jobs[-1]:
            return
        jobs[turn.at + 1].since = clock()  # before the loop is told that we are at it


class Reads:
    """The jobs of one backend that are under way."""

    def __init__(
        self, workers: Workers, deadline: float, clock: Callable[[], float], on_hang: Callable[[Job[Any]], None]
    ) -> None:
        """Prepare; `on_hang` is called once for each job that takes `deadline` seconds, while `left` has it."""
        self.left: dict[str, Job[Any]] = {}
        """Unit → the job that its thread was left with."""
        self._workers, self._on_hang = workers, on_hang
        self.deadline, self.clock = deadline, clock

    @property
    def slow(self) -> dict[str, Job[Any]]:
        """Those left that do not hang yet."""
        return {unit: job for unit, job in self.left.items() if not job.hangs}

    async def run(
        self, jobs: Sequence[Job[T]], do: Callable[[str], T], stop: Callable[[], bool] = lambda: False
    ) -> tuple[Sequence[Job[T]], Sequence[Job[T]]]:
        """Have a thread do these jobs, until one is slow, or `stop` says so; those that are done, and those not begun.

        Raises:
            NoWorkerError: there is no thread left that could.
        """
        if not jobs:
            return (), ()
        turn = _Turn()
        jobs[0].since = self.clock()
        thread = self._workers.start(partial(_work, jobs, do, turn, stop, self.clock))
        try:
            await asyncio.wait([thread], timeout=SLOW_AFTER)
            while not thread.done() and not turn.over:
                at = turn.at
                turn.over = self._is_left(jobs[at], thread)
                if not turn.over:
                    await asyncio.wait([thread], timeout=SLOW_AFTER)
        except asyncio.CancelledError:
            turn.over = True
            thread.cancel()
            raise
        if not turn.over:
            at = turn.at
        done = at + jobs[at].done
        if done > at and not jobs[at].hangs:
            self.left.pop(jobs[at].unit, None)
        return jobs[:done], [job.fresh() for job in jobs[at + 1 :]]

    def _is_left(self, job: Job[Any], thread: asyncio.Future[None]) -> bool:
        """Is the job that a thread is at slow, so that it is left to it?"""
        lasts = job.lasts(self.clock())
        if lasts < (SLOW_AFTER if job.unit else self.deadline):
            return False
        self.left[job.unit], job.thread = job, thread
        if lasts >= self.deadline:
            self._hangs(job)
        return True

    def _hangs(self, job: Job[Any]) -> None:
        job.hangs = True
        self._on_hang(job)

    def ended(self) -> list[Job[Any]]:
        """Take the slow jobs that are done off those left; those that hang by now stay, and are called that."""
        now, done = self.clock(), []
        for job in self.slow.values():
            if job.done:
                done.append(self.left.pop(job.unit))
            elif job.lasts(now) >= self.deadline:
                self._hangs(job)
        return done

    async def wait(self, urgent: asyncio.Event) -> None:
        """Wait until a slow job may be done, or `urgent` is set; for `STEP` seconds at most."""
        waiting = asyncio.ensure_future(urgent.wait())
        threads = [job.thread for job in self.slow.values() if job.thread is not None]
        futures: list[asyncio.Future[Any]] = [waiting, *threads]
        try:
            await asyncio.wait(futures, timeout=STEP, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
