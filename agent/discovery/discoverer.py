"""Keeps one backend's devices current: takes hints and timers, has units read, hands on what changed, reports what is wrong.

A scan covers units: all of them at the start, after an overflow and on a slow timer, else those that a hint affects.
What a read showed replaces what was known, and then what differs is published. A unit that could not be read keeps what was
known and is tried again. A unit whose read hangs is Unhealthy and left alone until its thread comes back. On a faster timer
the health of all known devices is probed; a hint interrupts that. Each problem is logged once when it begins and once when
it is over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any, Final

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from agent.discovery import backend_answers
from agent.discovery.backend_answers import ask
from agent.discovery.reading import (
    EVERY_UNIT,
    NOTHING,
    UNIT_DEADLINE,
    Changes,
    Job,
    Reads,
    Schedule,
    Todo,
    UnitState,
    changes_of,
    probe,
    read,
)
from agent.runtime import process
from agent.runtime.counts import Counts
from agent.runtime.errors import shown, words
from agent.runtime.workers import BATCH, NoWorkerError, Workers
from backends.base import (
    ALL,
    Backend,
    Device,
    Hint,
    Link,
    Problem,
    Record,
    Signal,
    Verdict,
    Watches,
)
from backends.errors import ShortageError
from backends.interface.values import Known

THREADS: Final = 64
"""Each read that hangs keeps one; as many units may hang before the others are no longer looked at."""

CALL_WELL: Final = 60.0
"""Seconds without a failure after which a call that events make counts as well. They come by the thousand, and it may fail
on every other one."""

_FOR_EVENTS: Final = ("affects", "signals")  # the calls of a backend that events make
_CALLS: Final = (*_FOR_EVENTS, "watches")  # what stands in a unit's place for problems that belong to a call

log = structlog.get_logger()


class LookError(Exception):
    """A unit that a call waits for cannot be read; the sentence says which and why."""


class _Waiter(Struct, eq=False):
    """A call that waits until units have been read."""

    units: Set[str]
    """Those that have not been."""
    answer: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    failed: dict[str, str] = field(default_factory=dict)
    """Unit → why it cannot be read."""
    begun: bool = False
    """Whether the scan has begun whose end it waits for. One under way when the call came may have read the unit before."""

    def end(self) -> None:
        if not self.answer.done() and self.failed:
            self.answer.set_exception(LookError("; ".join(self.failed[unit] for unit in sorted(self.failed))))
        elif not self.answer.done():
            self.answer.set_result(None)


class Discoverer:
    """Scans one backend's hardware: what was found last, and what has to be looked at again."""

    def __init__(
        self,
        kind: str,
        backend: Backend[Any],
        publish: Callable[[Changes], None],
        *,
        resync: float = 300.0,
        probe: float = 30.0,
        unit_deadline: float = UNIT_DEADLINE,
        on_watches: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        counts: Counts | None = None,
        before: Discoverer | None = None,
    ) -> None:
        """Prepare.

        Args:
            kind: the backend's name.
            backend: the instance that is asked. Another one has a discoverer of its own.
            publish: is told what has changed.
            resync: seconds between two looks at everything.
            probe: seconds between two probes of all that is known.
            unit_deadline: seconds after which a read is taken to hang.
            on_watches: is told when `watched` is another.
            clock: the time in seconds.
            counts: has the durations of scans.
            before: the one in force, whose place this one may take (`take_over`); until then that goes on.
        """
        self.kind = kind
        self.backend = backend
        self.workers: Workers = before.workers if before else Workers(kind, THREADS)  # those that hang count, too
        self.units: dict[str, UnitState] = {}
        """What is known of each unit."""
        self.known: Known = before.known.copy() if before else Known()
        """Their devices, as backends are shown them."""
        self._having_beside: set[str] = set()
        self.problems: dict[str, tuple[Problem, ...]] = {}
        """What is wrong with units, and calls (`affects`); `EVERY_UNIT` stands for the backend as a whole."""
        if before is not None:
            self._take(
                {unit: replace(it, signals=(), glance=None, inherited=True) for unit, it in before.units.items()}
            )
            self.problems |= {unit: it for unit, it in before.problems.items() if unit not in _FOR_EVENTS}
        self._inherited = self.units.copy()
        self.schedule = Schedule(resync, probe, clock)
        self.watched = Watches()
        """What the sources should listen to for this backend, as it said last."""
        self.first_scan = asyncio.Event()
        """Set when the first full scan has come to its end."""
        self._publish, self._on_watches = publish, on_watches
        self._clock = clock
        self.reads = Reads(self.workers, unit_deadline, clock, self._leave_alone)
        self._waiters: list[_Waiter] = []
        self._soon_well: dict[str, asyncio.TimerHandle] = {}
        self._pile = process.Pile()
        self._walked_all = False
        self._hinted_at: float | None = None
        self._durations = (counts or Counts()).discovery[kind]

    # --- what makes it look ---

    def hint(self, hint: Hint) -> None:
        """Have the units looked at that an event affects. Called for every event that the backend asked for; cheap."""
        try:
            units = ask(lambda: backend_answers.affected(self.backend.affects(hint, self.known)))
        except Exception as error:  # noqa: BLE001  # reported; a full scan sees what changed
            self._call_failed("affects", f"affects() failed on {hint}: {shown(error)}")
            units = ALL
        else:
            if "affects" in self.problems:
                self._call_answered("affects")
        if units:
            self._hinted_at = self._clock() if self._hinted_at is None else self._hinted_at
            self.schedule.ask(units)

    def signals(self, record: Record) -> tuple[Signal, ...]:
        """The signals that the backend makes of a record; none if it fails on it."""
        try:
            said = ask(lambda: backend_answers.signals("signals", self.backend.signals(record)))
        except Exception as error:  # noqa: BLE001  # reported; the next record may be one that it understands
            self._call_failed("signals", f"signals() failed on {record}: {shown(error)}")
            return ()
        if "signals" in self.problems:
            self._call_answered("signals")
        return said

    @property
    def is_stuck(self) -> bool:
        """Whether a read hangs or a call fails, so that another instance may do better, and a thread is free for it."""
        hangs = any(job.hangs for job in self.reads.lingering.values())
        return (hangs or not self.problems.keys().isdisjoint(_CALLS)) and self.workers.spare

    def links(self) -> dict[str, tuple[Link, ...]]:
        """The links that were found so far, by unit."""
        return {unit: it.links for unit, it in self.units.items() if it.links}

    def selectable(self) -> list[Device]:
        """All devices that a selector may match, and what is beside them (`Discovery.beside`)."""
        return [device for found in self.known.values() for device in found] + list(self._beside())

    def _beside(self) -> Iterator[Device]:
        return (device for unit in sorted(self._having_beside) for device in self.units[unit].beside)

    def sees(self, hardware: str) -> bool:
        """Whether a device of the last scan, or one of what is beside them, owns this hardware or depends on it."""
        return bool(self.known.minding(hardware)) or any(
            hardware in device.hardware | device.depends for device in self._beside()
        )

    def unseen(self) -> str:
        """Why there may be devices that no scan has found yet, in one sentence; empty if every unit has been read."""
        unread = (unit for unit in sorted(self.problems) if unit not in self.known and unit not in _CALLS)
        if (unit := next(unread, None)) is not None:
            return self.problems[unit][0].sentence
        return "" if self.first_scan.is_set() else f"the first look at the hardware of {self.kind} has not ended yet"

    def rescan(self) -> None:
        """Look at everything again."""
        self.schedule.ask(ALL)

    async def look_at(self, units: Iterable[str]) -> None:
        """Have these units looked at, and wait until what a scan that begins after this call found is published.

        Raises:
            LookError: one of them cannot be read, or hangs; the sentence says which and why.
        """
        wanted = frozenset(units)
        for unit in sorted(wanted & self.reads.lingering.keys()):
            if self.reads.lingering[unit].hangs:
                raise LookError(self._hangs(unit))
        if not wanted:
            return
        self.schedule.ask(wanted)
        self._waiters.append(waiter := _Waiter(wanted))
        try:
            await waiter.answer
        finally:
            self._waiters.remove(waiter)

    async def run(self) -> None:
        """Scan and probe for ever, whenever there is a reason to. Begins with a look at everything."""
        self.schedule.restart()
        try:
            while True:
                todo = await self.schedule.next(self.known)
                if todo.probes:
                    await self._probe(todo)
                else:
                    await self._scan(todo)
                if self._walked_all and not (self.reads.lingering and self.reads.slow):
                    self.first_scan.set()
        finally:
            self.workers.close()

    # --- another configuration ---

    def take_over(self, before: Discoverer | None) -> Changes:
        """Take the place of the one before; what differs from what that knew, for the caller to publish.

        What the other knows counts for units that were not read here yet, and for those that changed after this one
        began: they have to be looked at again.
        """
        began, self._inherited = self._inherited, {}
        theirs = before.units if before else {}
        moved = (began.keys() ^ theirs.keys()) | {
            unit for unit, it in theirs.items() if began.get(unit, NOTHING).devices is not it.devices
        }
        believed = moved | {unit for unit, it in self.units.items() if it.inherited}
        self._take({unit: theirs.get(unit, NOTHING) for unit in believed})
        now = self.units | dict.fromkeys(theirs.keys() - self.units.keys(), NOTHING)
        return changes_of(self.kind, theirs, now, believed & self.units.keys(), by_reload=True)

    def leave(self) -> None:
        """Answer all that wait: another discoverer has taken this one's place, or the backend is not configured any more."""
        for waiter in self._waiters:
            waiter.failed.clear()
            waiter.end()
        for call in _FOR_EVENTS:
            self._call_is_well(call)
        self.first_scan.set()

    def nothing_left(self) -> Changes:
        """The changes where a backend is not configured any more: all that was found is gone."""
        return changes_of(self.kind, self.units, dict.fromkeys(self.units, NOTHING), by_reload=True)

    # --- one scan ---

    async def _scan(self, todo: Todo) -> None:
        """Read the units that are due. Where a read is slow or hangs, what was read is published, and it goes on without it."""
        began, since, self._hinted_at = self._clock(), self._hinted_at, None
        for job in self.reads.lingering.values():  # they began before we were asked
            job.stale |= todo.everything or job.unit in todo.units
        for waiter in self._waiters:
            waiter.begun |= waiter.units.isdisjoint(self.reads.lingering)
        units: Set[str] = todo.units
        gone: Set[str] = frozenset()
        if todo.everything:
            if (listed := await self._list()) is None:
                units = todo.units | self.known.keys()
            else:
                units, gone = listed, self.known.keys() - listed
                for job in self.reads.lingering.values():
                    job.unlisted = job.unit not in listed
        failed, _ = await self._walk([Job(unit, hinted=since) for unit in sorted(units)], self._read, gone=gone)
        if self._waiters:
            self._answer(failed)
        if self.reads.lingering:
            await self._end_slow()
        self._durations.observe(self._clock() - began)
        self._walked_all |= todo.everything

    async def _probe(self, todo: Todo) -> None:
        """Probe the devices that are due. Where a hint interrupts that, the others are probed after it.

        Devices that cannot be used are read instead: what keeps them from that may end without any event.
        """
        late = set[str]()
        if not todo.at_a_glance:
            late = {unit for unit in todo.probes if any(device.unusable for device in self.known.get(unit, ()))}
        probed = sorted((todo.probes & self.known.keys()) - late)
        jobs: list[Job[UnitState]] = [Job(unit, probes=True) for unit in probed]
        do = partial(self._probe_unit, at_a_glance=todo.at_a_glance)
        _, left = await self._walk(jobs, do, stop=self.schedule.asked.is_set)
        self.schedule.put_off({job.unit for job in left}, at_a_glance=todo.at_a_glance)
        if late:
            self.schedule.ask(late)
        if self.reads.lingering:
            await self._end_slow()

    async def _list(self) -> Set[str] | None:
        """All units there are; None if they cannot be listed, which is reported."""
        if EVERY_UNIT in self.reads.lingering:
            return None
        job: Job[frozenset[str]] = Job(EVERY_UNIT)
        try:
            await self.reads.run([job], self._list_units)
        except NoWorkerError as error:
            self._no_worker(error)
            return None
        if job.error is not None:
            self._fails(f"backend {self.kind} cannot list its units: {words(job.error)}")
        if job.hangs or job.result is None:
            return None
        for unit in self.problems.keys() - job.result - {*_CALLS}:
            self._was_read(unit)
        return job.result

    async def _walk(
        self,
        jobs: Sequence[Job[UnitState]],
        do: Callable[[str], UnitState],
        *,
        gone: Set[str] = frozenset(),
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[dict[str, str], Sequence[Job[UnitState]]]:
        """Have these jobs done, and take in what comes of them; why units cannot be read, and the jobs that `stop` left out."""
        jobs = [job for job in jobs if job.unit not in self.reads.lingering]
        failed: dict[str, str] = {}
        while True:
            try:
                done, jobs = await self.reads.run(jobs, do, stop)
            except NoWorkerError as error:
                self._no_worker(error)
                return failed | {job.unit: str(error) for job in jobs}, ()
            failed |= await self._digest(done, gone)
            if not jobs or stop():
                return failed, jobs
            gone = frozenset()

    async def _end_slow(self) -> None:
        """Take in slow reads as they end, until something more urgent comes up."""
        while True:
            failed: dict[str, str] = {}
            for job in self.reads.ended():
                if job.unlisted:  # what it saw was before that
                    continue
                failed |= await self._digest([job])
                if job.stale:
                    self.schedule.ask([job.unit])
            self._answer(failed)  # not before all are taken in: they are no slow reads any more
            if self.schedule.asked.is_set() or not self.reads.slow:
                return
            await self.reads.wait(self.schedule.asked)

    def _answer(self, failed: Mapping[str, str]) -> None:
        """Answer the calls whose units have been read since they came; `failed` says of which that failed, and why."""
        for waiter in self._waiters:
            if waiter.begun:
                waiter.failed |= {unit: failed[unit] for unit in waiter.units & failed.keys()}
                waiter.units &= self.reads.slow.keys()
                if not waiter.units:
                    waiter.end()

    # --- in a thread ---

    def _list_units(self, _: str) -> frozenset[str]:
        listed = backend_answers.units(self.backend.units())
        if not self.known.keys() <= listed:
            process.see_that_files_open()
        return listed

    def _read(self, unit: str) -> UnitState:
        before = self.units.get(unit, NOTHING)
        found = read(self.backend, unit, before)
        if found.devices is not before.devices:
            self._pile.grow(len(found.devices))
        return found

    def _probe_unit(self, unit: str, *, at_a_glance: bool) -> UnitState:
        return probe(self.backend, self.units.get(unit, NOTHING), at_a_glance=at_a_glance)

    # --- what came of it ---

    async def _digest(self, done: Sequence[Job[UnitState]], gone: Set[str] = frozenset()) -> dict[str, str]:
        """Take in what was found, publish what differs, and report what went wrong; why units could not be read.

        Many devices take several steps of the loop, as if there had been several scans.
        """
        after, failed = dict[str, UnitState](), dict[str, str]()
        for job in done:
            found, now = job.result, self.units.get(job.unit, NOTHING)
            if job.error is not None:  # 1. what was known stays
                failed[job.unit] = f"{job.unit} cannot be read: {words(job.error)}"
            elif found is None or (job.probes and (now is NOTHING or now.devices is not found.devices)):
                continue  # 2. the unit is another one since the probe began
            elif job.probes and found.signals is now.signals:  # 3. nothing new but the glance
                self.units[job.unit] = found
            else:  # 4. it was read, or says something else
                after[job.unit] = found
        after |= dict.fromkeys(gone, NOTHING)
        are_probes = bool(done) and done[0].probes
        is_other = bool(gone) or any(self.known.get(unit) is not it.devices for unit, it in after.items())
        changes = changes_of(self.kind, self.units, after, since=done[0].hinted if done else None)
        for part in changes.in_parts(BATCH) if after or not are_probes else ():
            before = {unit: self.units.get(unit, NOTHING) for unit in part.signals}
            self._take({unit: after[unit] for unit in part.signals})
            try:
                self._publish(part)
            except BaseException:
                self._take(before)  # the next scan finds it again
                raise
            if part.more:
                await asyncio.sleep(0)
        for job in done:
            if job.error is not None:
                self._report(job.unit, [Problem(job.unit, failed[job.unit])])
                # a shortage of ours may be over the next moment
                self.schedule.retry(job.unit, steady=isinstance(job.error, ShortageError))
            elif not are_probes and job.result is not None:
                if job.result.problems or job.unit in self.problems or job.unit in self.schedule.retries:
                    self._was_read(job.unit, job.result.problems)
                if job.result.settles:
                    self.schedule.retry(job.unit, after=job.result.settles)
        if is_other or (not are_probes and "watches" in self.problems):
            await asyncio.sleep(0)  # the list goes first: `watches` may look at all that is known
            watched = self.watched
            if self.watches() != watched:
                self._on_watches()
        return failed

    def _take(self, states: Mapping[str, UnitState]) -> None:
        for unit, now in states.items():
            if now is NOTHING:
                self._having_beside.discard(unit)
                if self.units.pop(unit, None) is not None:
                    del self.known[unit]
                continue
            if self.known.get(unit) is not now.devices:
                self.known[unit] = now.devices
            if now.beside:
                self._having_beside.add(unit)
            else:
                self._having_beside.discard(unit)
            self.units[unit] = now

    def watches(self) -> Watches:
        """Ask the backend what the sources should listen to."""
        try:
            watches = ask(lambda: self.backend.watches(self.known))
            if watches != self.watched:
                self.watched = backend_answers.watches(self.backend, watches)
                self.schedule.poll = watches.poll
        except Exception as error:  # noqa: BLE001  # reported; it is asked again after the next scan, which is soon
            self._report("watches", [Problem("watches", f"watches() failed: {shown(error)}")])
            self.schedule.retry(EVERY_UNIT)
        else:
            if "watches" in self.problems:
                self._report("watches", [])
                if EVERY_UNIT not in self.problems:
                    self.schedule.is_well(EVERY_UNIT)
        return self.watched

    # --- what hangs ---

    def _hangs(self, unit: str) -> str:
        what = f"reading {unit}" if unit else "listing its units"
        return f"{what} has hung for more than {self.reads.deadline:g} s; it is left alone until the read returns"

    def _leave_alone(self, job: Job[Any]) -> None:
        """Leave a unit alone whose read hangs, until its thread comes back; its devices are Unhealthy: no pod shall get them."""
        unit, why = job.unit, self._hangs(job.unit)
        self._report(unit, [Problem(unit or self.kind, why)])
        for waiter in self._waiters:
            if unit in waiter.units:
                waiter.failed = {unit: why}
                waiter.end()
        if job.thread is not None:
            job.thread.add_done_callback(lambda _: self._release(job))
        hardware = sorted({name for device in self.known.get(unit, ()) for name in device.hardware})
        if hardware:
            said = tuple(Signal(name, "hangs", Verdict.NOW, f"nobody knows how it is: {why}") for name in hardware)
            self._take({unit: replace(self.units[unit], signals=said, inherited=False)})
            self._publish(Changes(self.kind, {}, {unit: said}))

    def _release(self, job: Job[Any]) -> None:
        """Look at a unit again whose thread has come back; at all units, if there was no thread left."""
        if self.reads.lingering.get(job.unit) is not job:
            return
        del self.reads.lingering[job.unit]
        self.schedule.ask([job.unit] if job.unit and EVERY_UNIT not in self.problems else ALL)

    # --- what is wrong ---

    def _report(self, unit: str, problems: Iterable[Problem]) -> None:
        """Keep the problems of a unit or a call, and log those that are new, or that there are none any more."""
        before, after = self.problems.get(unit, ()), tuple(problems)
        if before == after:
            return
        if after:
            self.problems[unit] = after
            for problem in (problem for problem in after if problem not in before):
                log.warning("discovery-problem", backend=self.kind, subject=problem.subject, reason=problem.sentence)
        else:
            del self.problems[unit]
            log.info("discovery-problem-solved", backend=self.kind, subject=unit or self.kind)

    def _was_read(self, unit: str, problems: Iterable[Problem] = ()) -> None:
        self._report(unit, problems)
        self.schedule.is_well(unit)

    def _fails(self, sentence: str) -> None:
        """Report a problem of the backend as a whole."""
        self._report(EVERY_UNIT, [Problem(self.kind, sentence)])
        self.schedule.retry(EVERY_UNIT)

    def _no_worker(self, error: NoWorkerError) -> None:
        self._fails(f"{error}; its devices are shown as they were last seen")

    def _call_failed(self, call: str, sentence: str) -> None:
        """Report a call that events make and that failed. The first sentence stays: each failure has another."""
        if (timer := self._soon_well.pop(call, None)) is not None:
            timer.cancel()
        if call not in self.problems:
            self._report(call, [Problem(call, sentence)])

    def _call_answered(self, call: str) -> None:
        """Note that a call which failed before did not fail now."""
        if call in self.problems and call not in self._soon_well:
            self._soon_well[call] = asyncio.get_running_loop().call_later(CALL_WELL, self._call_is_well, call)

    def _call_is_well(self, call: str) -> None:
        """End the problem of a call: it has not failed for long, or its backend is not in force any more."""
        if (timer := self._soon_well.pop(call, None)) is not None:
            timer.cancel()
        self._report(call, ())
