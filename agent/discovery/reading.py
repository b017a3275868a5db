"""Reads and probes units in threads, one job for each unit: a unit that is slow, or hangs, is a job that is not done yet.

A thread does one job after the other. Where one is slow, it is left to its thread, and another thread goes on with the
rest. What backends answer is checked here, so that nonsense is a failure of the unit it came from.

What is known of a unit is one value, `UnitState`; each job makes the next, and `changes_of` tells what differs for inventory
and health. `Schedule` says which units are due, and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from agent.discovery import backend_answers
from agent.runtime import process
from agent.runtime.pacing import STEP, Backoff, Running
from agent.runtime.workers import Workers
from backends.base import ALL, All, Backend, Device, Link, Problem, Signal, Verdict

# --- what is known of a unit ---


class UnitState(Struct, frozen=True, gc=False):
    """What a read or a probe of a unit showed. A part that is equal to the one before it is the same object."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    beside: tuple[Device, ...] = ()
    """`Discovery.beside`."""
    problems: tuple[Problem, ...] = ()
    settles: float = 0.0
    """`Discovery.settles`."""
    signals: tuple[Signal, ...] = ()
    """What its last probe said."""
    glance: tuple[object, ...] | None = None
    """What a glance at each device showed right before the last probe, so that whatever has changed since then shows at the
    next. None if it was read since: the next glance has it probed."""
    inherited: bool = False
    """It was read by another instance of the backend, and not yet by this one: its signals are not known."""


NOTHING: Final = UnitState()
"""What is known of a unit that has not been read, and of one that is gone."""


class Changes(Struct, frozen=True):
    """What a scan or a probe of one backend found that differs from before."""

    backend: str
    units: Mapping[str, tuple[Device, ...]]
    """Units whose devices, or what is beside them, differ from before; an empty tuple is a unit that has no devices or is gone."""
    signals: Mapping[str, tuple[Signal, ...]]
    """Every unit that was read, with all signals of its probes; none of a unit that is gone.
    A unit that was only probed is here if its signals differ from the last ones, or have a measure."""
    links: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)
    """Units whose links differ from before."""
    since: float | None = None
    """When, on the monotonic clock, the first hint came that led to this scan; None: a timer did."""
    by_reload: bool = False
    """These are the changes of a reload: another instance of the backend found this, or there is none any more."""
    beside: Mapping[str, tuple[Device, ...]] = field(default_factory=dict)
    """`Discovery.beside` of these units."""
    more: bool = False
    """More follows at once: what the scan found is too much for one step of the loop, and this is a part of it."""

    def in_parts(self, size: int) -> Iterator[Changes]:
        """Yield the same in parts of about `size` devices, at least one.

        Units that have devices come before those that have none any more: hardware that has moved from one unit to
        another has not been away.
        """
        parts: list[list[str]] = [[]]
        devices = 0
        for unit in sorted({**self.units, **self.signals}, key=lambda unit: self.units.get(unit) == ()):
            if devices >= size:
                parts.append([])
                devices = 0
            parts[-1].append(unit)
            devices += max(1, len(self.units.get(unit, ())), len(self.signals.get(unit, ())))
        for number, part in enumerate(parts, 1):
            yield replace(
                self,
                units={unit: self.units[unit] for unit in part if unit in self.units},
                signals={unit: self.signals[unit] for unit in part if unit in self.signals},
                links={unit: self.links[unit] for unit in part if unit in self.links},
                beside={unit: self.beside[unit] for unit in part if unit in self.beside},
                by_reload=self.by_reload and number == 1,
                more=number < len(parts),
            )


def changes_of(
    kind: str,
    before: Mapping[str, UnitState],
    after: Mapping[str, UnitState],
    untold: Set[str] = frozenset(),
    *,
    since: float | None = None,
    by_reload: bool = False,
) -> Changes:
    """What differs between these states of units; `NOTHING` is a unit that is gone.

    Args:
        kind: the backend's name.
        before: what was known.
        after: what is known now of the units that may differ.
        untold: the units of which no signals are told; of the others they are, whether they differ or not.
        since: when the first hint came that led to this.
        by_reload: whether another instance knows `after`.
    """
    pairs = [(unit, before.get(unit, NOTHING), now) for unit, now in after.items()]
    differ = {
        unit: now
        for unit, was, now in pairs
        if now is NOTHING or now.devices is not was.devices or now.beside is not was.beside
    }
    return Changes(
        kind,
        {unit: now.devices for unit, now in differ.items()},
        {unit: now.signals for unit, now in after.items() if unit not in untold},
        {unit: now.links for unit, was, now in pairs if now.links is not was.links},
        since,
        by_reload,
        {unit: now.beside for unit, now in differ.items() if now.beside},
    )


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
    beside = before.beside if found.beside == before.beside else found.beside
    if devices is not before.devices or found.problems or _is_ill(signals):
        process.see_that_files_open()
    return UnitState(devices, links, beside, found.problems, found.settles, signals)


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
        process.see_that_files_open()
    is_new = signals != before.signals or any(signal.measure is not None for signal in signals)
    return replace(before, signals=signals if is_new else before.signals, glance=glance)


def _is_ill(signals: Iterable[Signal]) -> bool:
    return any(signal.verdict in (Verdict.NOW, Verdict.DELAYED) and signal.measure is None for signal in signals)


# --- many units ---


class Job(Struct, Generic[T], eq=False):
    """What is to be done with one unit. Its thread writes what came of it, the loop reads that."""

    unit: str
    probes: bool = False
    """Whether its devices are only probed."""
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
    """The unit is to be looked at again once it is done: it began before that was asked for."""
    unlisted: bool = False
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
        """Prepare; `on_hang` is called once for each job that takes `deadline` seconds, while `lingering` has it."""
        self.lingering: dict[str, Job[Any]] = {}
        """Unit → the job that its thread was left with."""
        self._workers, self._on_hang = workers, on_hang
        self.deadline, self.clock = deadline, clock

    @property
    def slow(self) -> dict[str, Job[Any]]:
        """Those left that do not hang yet."""
        return {unit: job for unit, job in self.lingering.items() if not job.hangs}

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
                turn.over = self._leave_if_slow(jobs[at], thread)
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
            self.lingering.pop(jobs[at].unit, None)
        return jobs[:done], [job.fresh() for job in jobs[at + 1 :]]

    def _leave_if_slow(self, job: Job[Any], thread: asyncio.Future[None]) -> bool:
        """Leave a thread to its job, which lingers from now on, if that is slow; returns whether it is."""
        lasts = job.lasts(self.clock())
        if lasts < (SLOW_AFTER if job.unit else self.deadline):
            return False
        self.lingering[job.unit], job.thread = job, thread
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
                done.append(self.lingering.pop(job.unit))
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


# --- what is due, and why ---


_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0  # seconds before a failed unit is tried again, doubling
_SOONEST: Final = 0.05  # seconds to the next look that a backend asks for: one that asks for ever takes no whole core


class Todo(Struct):
    """What the next walk covers."""

    everything: bool = False
    units: set[str] = field(default_factory=set)
    """To be looked at."""
    probes: set[str] = field(default_factory=set)
    """Units of which only the health is probed. Never beside units to be looked at."""
    at_a_glance: bool = False
    """Whether only those are probed that a glance (`Backend.glance`) shows to have changed."""


class Schedule:
    """The units of one backend that are due, and why."""

    def __init__(self, resync: float, probe: float, clock: Callable[[], float]) -> None:
        """Prepare.

        Args:
            resync: seconds between two looks at everything.
            probe: seconds between two probes of all that is known.
            clock: the time in seconds.
        """
        self.poll: float | None = None
        """Seconds between two glances that the backend asks for."""
        self._clock = clock
        self._resync, self._probe = resync, probe
        self._resynced = self._probed = self._glanced = clock()
        self._todo = Todo()
        self._passed_over = False  # whether probes have waited for the scan before
        self.asked = asyncio.Event()
        """Set while something more urgent waits than what `next` returned last: slow reads and probes give way to it."""
        self.retries: dict[str, tuple[float, Backoff]] = {}
        """The units that are tried again by a timer of their own, and when."""

    def ask(self, units: Iterable[str] | All) -> None:
        """Have these units looked at as soon as possible."""
        if units is ALL:
            self._todo.everything = True
        else:
            self._todo.units.update(units)
        self.asked.set()

    def put_off(self, probes: Set[str], *, at_a_glance: bool) -> None:
        """Probe these later, which are left of what was to be probed: something more urgent came up."""
        if probes:
            self._todo.probes.update(probes)
            self._todo.at_a_glance = at_a_glance
            self.asked.set()

    def restart(self) -> None:
        """Begin again, with a look at everything."""
        self._resynced = self._probed = self._glanced = self._clock()
        self._todo.everything = True

    async def next(self, known: Collection[str]) -> Todo:
        """Wait until something is due; the result has units to be looked at, or probes, never both.

        Looks come first. Where one look follows the other, probes get every second turn.
        """
        loop = asyncio.get_running_loop()
        while True:
            self.asked.clear()
            if (seconds := self._due_in(known)) <= 0:
                break
            timer = loop.call_later(seconds, self.asked.set)  # a cancel scope takes 20 us longer, for each event
            try:
                await self.asked.wait()
            finally:
                timer.cancel()
        todo, self._todo = self._todo, Todo()
        has_both = bool(todo.probes and (todo.everything or todo.units))
        if has_both:
            looks, probes = Todo(todo.everything, todo.units), Todo(probes=todo.probes, at_a_glance=todo.at_a_glance)
            todo, self._todo = (probes, looks) if self._passed_over else (looks, probes)
            self.asked.set()
        self._passed_over = has_both and not todo.probes
        return todo

    def _due_in(self, known: Collection[str]) -> float:
        """Add what has become due. Returns the seconds until something is, 0 if something is now.

        The next probes begin when none are left of the last: else units late in the alphabet would never be probed.
        """
        now, todo = self._clock(), self._todo
        if now >= self._resynced + self._resync:
            self._resynced = now
            todo.everything = True
        if now >= self._probed + self._probe and (todo.at_a_glance or not todo.probes):
            self._probed = self._glanced = now
            todo.probes.update(known)
            todo.at_a_glance = False
        if self.poll is not None and now >= self._glanced + self.poll and not todo.probes:
            self._glanced = now
            todo.probes.update(known)
            todo.at_a_glance = bool(known)
        for unit, (at, backoff) in self.retries.items():
            if at <= now:
                self.retries[unit] = (now + backoff.next(), backoff)
                if unit == EVERY_UNIT:
                    todo.everything = True
                else:
                    todo.units.add(unit)
        if todo != Todo():
            return 0.0
        timers = [self._resynced + self._resync, self._probed + self._probe, *(at for at, _ in self.retries.values())]
        if self.poll is not None:
            timers.append(self._glanced + self.poll)
        return min(timers) - now

    def retry(self, unit: str, *, steady: bool = False, after: float | None = None) -> None:
        """Look at this unit again in a second, or `after` so many, and then ever later; each time that soon if `steady`."""
        if steady or unit not in self.retries:
            backoff = Backoff(_RETRY_FIRST if after is None else max(after, _SOONEST), _RETRY_MOST)
            self.retries[unit] = (self._clock() + backoff.next(), backoff)

    def is_well(self, unit: str) -> None:
        """Do not try this unit again: it could be read."""
        self.retries.pop(unit, None)
