"""Keeps one backend's devices current: takes hints and timers, scans units, hands on what changed.

A scan covers units: all of them at the start, after an overflow and on a slow timer, else those that a hint affects.
What a scan read replaces what was known. A unit that could not be read keeps what was known and is tried again. Where a
read is slow, another thread goes on with the other units. A unit whose read hangs is Unhealthy and left alone until its
thread comes back. On a faster timer the health of all known devices is probed; a hint interrupts that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from agent.discovery import backend_answers, slow_reads
from agent.discovery.backend_answers import ask
from agent.discovery.changes import Changes, changes_by_exchange, changes_of
from agent.discovery.reports import CALLS, FOR_EVENTS, Reports, cannot_read, hangs, signals_of_hung
from agent.discovery.scan_waiters import LookError, Waiters
from agent.discovery.schedule import EVERY_UNIT, Schedule, Todo
from agent.discovery.slow_reads import SlowReads
from agent.discovery.unit_walk import Seen, Walk, probe, walk
from agent.runtime.chunked_work import BATCH
from agent.runtime.counts import Counts
from agent.runtime.errors import shown
from agent.runtime.workers import NoWorkerError, Workers
from backends.base import ALL, Backend, Device, Hint, Link, Problem, Record, Signal, Watches

UNIT_DEADLINE: Final = 5.0
"""Seconds after which a read is taken to hang."""

THREADS: Final = 64
"""Each read that hangs keeps one; as many units may hang before the others are no longer looked at."""


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
        self._seen: Seen = before._seen.inherited() if before else Seen()
        self._inherited = dict(self._seen.devices.items())
        self.known = self._seen.devices
        self.schedule = Schedule(resync, probe, clock)
        self._reports = Reports(kind, self.schedule, before.problems_of_units() if before else {})
        self.problems: dict[str, tuple[Problem, ...]] = self._reports.problems
        self._publish = publish
        self._on_watches = on_watches
        self.watched = Watches()
        """What the sources should listen to for this backend, as it said last."""
        self._unit_deadline = unit_deadline
        self._clock = clock
        self._waiting = Waiters()
        self.first_scan = asyncio.Event()
        """Set when the first full scan has come to its end."""
        self._hung: dict[str, asyncio.Future[None]] = {}
        self._slow = SlowReads()
        self._read_again: set[str] = set()  # slow units to be looked at once more when they are done
        self._walked_all = False
        self._hinted_at: float | None = None
        self._durations = (counts or Counts()).discovery[kind]

    # --- what makes it look ---

    def hint(self, hint: Hint) -> None:
        """Have the units looked at that an event affects. Called for every event on the node; cheap."""
        try:
            units = ask(lambda: backend_answers.affected(self.backend.affects(hint, self.known)))
        except Exception as error:  # noqa: BLE001  # reported; a full scan sees what changed
            self._reports.call_failed("affects", f"affects() failed on {hint}: {shown(error)}")
            units = ALL
        else:
            if "affects" in self.problems:
                self._reports.call_answered("affects")
        if units:
            self._hinted_at = self._clock() if self._hinted_at is None else self._hinted_at
            self.schedule.ask(units)

    def signals(self, record: Record) -> tuple[Signal, ...]:
        """The signals that the backend makes of a record; none if it fails on it."""
        try:
            said = ask(lambda: backend_answers.signals("signals", self.backend.signals(record)))
        except Exception as error:  # noqa: BLE001  # reported; the next record may be one that it understands
            self._reports.call_failed("signals", f"signals() failed on {record}: {shown(error)}")
            return ()
        if "signals" in self.problems:
            self._reports.call_answered("signals")
        return said

    def problems_of_units(self) -> dict[str, tuple[Problem, ...]]:
        """The problems, but for those of calls that events make: another instance need not have them."""
        return {unit: problems for unit, problems in self.problems.items() if unit not in FOR_EVENTS}

    @property
    def is_stuck(self) -> bool:
        """Does a read hang or a call fail, so that another instance may do better, and is there a thread to try it?"""
        return bool(self._hung or self.problems.keys() & CALLS) and self.workers.spare

    def links(self) -> dict[str, tuple[Link, ...]]:
        """The links that were found so far, by unit."""
        return self._seen.links.copy()

    def selectable(self) -> list[Device]:
        """All devices that a selector may match, and what is beside them (`Discovery.beside`)."""
        return self._seen.selectable()

    def sees(self, hardware: str) -> bool:
        """Has the last scan found this hardware?"""
        return self._seen.has(hardware)

    def unseen(self) -> str:
        """Why there may be devices that no scan has found yet, in one sentence; empty if every unit has been read."""
        unread = (unit for unit in sorted(self.problems) if unit not in self.known and unit not in CALLS)
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
        for unit in sorted(wanted & self._hung.keys()):
            raise LookError(self._hangs(unit))
        if wanted:
            self.schedule.ask(wanted)
            await self._waiting.wait(wanted)

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
        finally:
            self.workers.close()

    # --- another configuration ---

    def take_over(self, before: Discoverer | None) -> Changes:
        """Take the place of the one before; what differs from what that knew, for the caller to publish.

        What the other knows counts for units that were not read here yet, and for those that changed after this one
        began: they have to be looked at again.
        """
        inherited, self._inherited = self._inherited, {}
        return changes_by_exchange(self.kind, self._seen, inherited, before._seen if before else Seen())

    def leave(self) -> None:
        """Answer whoever waits: another discoverer has taken this one's place, or the backend is not configured any more."""
        self._waiting.let_go()
        for call in FOR_EVENTS:
            self._reports.call_is_well(call)
        self.first_scan.set()

    def nothing_left(self) -> Changes:
        """The changes where a backend is not configured any more: all that was found is gone."""
        return replace(changes_of(self.kind, {}, frozenset(self.known), self._seen), by_reload=True)

    # --- one scan ---

    async def _scan(self, todo: Todo) -> None:
        """Read the units that are due. Where a read is slow or hangs, publish what was read and go on without it."""
        slow, waiters = self._slow.reads, self._waiting
        stale = slow.keys() if todo.everything else todo.units & slow.keys()
        self._read_again |= stale  # their reads began before we were asked
        if waiters.waiting:
            waiters.begin(stale)
        began, since, self._hinted_at = self._clock(), self._hinted_at, None
        failed: dict[str, str] = {}
        units: Set[str] | None = todo.units - self._hung.keys()
        if todo.everything:  # as long as the listing hangs, everything is what is known
            units = None if EVERY_UNIT not in self._hung else (todo.units | self.known.keys()) - self._hung.keys()
        while units is None or units:
            progress = Walk()
            skip = frozenset(self._hung.keys() | slow.keys())
            call = partial(walk, self.backend, units, skip, self._seen, progress, self._clock)
            try:
                failure = await self._run(call, progress)
            except NoWorkerError as error:
                self._reports.no_worker(error)
                failed |= dict.fromkeys(units or todo.units, str(error))
                break
            if progress.abandoned:
                progress = progress.so_far()
            failed |= {unit: cannot_read(unit, error) for unit, error in progress.failures.items()}
            await self._digest(progress, failure, since)
            if not progress.abandoned and failure is None:
                break
            units = self._rest(progress, units, todo)
        if waiters.waiting:
            waiters.end(failed, slow.keys())
        if slow:
            await self._end_slow(since)
        self._durations.observe(self._clock() - began)
        self._walked_all |= todo.everything
        if self._walked_all and not slow:
            self.first_scan.set()

    async def _probe(self, todo: Todo) -> None:
        """Probe the devices that are due. Where a hint interrupts that, the others are probed after it.

        Devices that cannot be used are read instead: what keeps them from that may end without any event.
        """
        late = set[str]()
        if not todo.at_a_glance:
            late = {unit for unit in todo.probes if any(device.unusable for device in self.known.get(unit, ()))}
        units: Set[str] = (todo.probes & self.known.keys()) - self._hung.keys() - late
        is_interrupted = self.schedule.asked.is_set
        while units:
            progress = Walk()
            call = partial(
                probe, self.backend, units, self._seen, progress, self._clock, is_interrupted,
                at_a_glance=todo.at_a_glance,
            )  # fmt: skip
            try:
                await self._run(call, progress)
            except NoWorkerError as error:
                self._reports.no_worker(error)
                break
            if progress.abandoned:
                progress = progress.so_far()
            await self._digest_probes(progress)
            units = self._rest(progress, units, todo)
            if is_interrupted():
                self.schedule.put_off(units, at_a_glance=todo.at_a_glance)
                break
        if late:
            self.schedule.ask(late)
        if self._slow.reads:
            await self._end_slow(None)

    async def _run(self, call: Callable[[], None], progress: Walk) -> Exception | None:
        """Have a thread walk, to its end or until one of its reads is slow or hangs; returns the error that ended it.

        Raises:
            NoWorkerError: there is no thread left that could.
        """
        progress.since = began = self._clock()  # before the thread starts, which from then on sets it itself
        job = self.workers.start(call)
        try:
            done, _ = await asyncio.wait([job], timeout=slow_reads.SLOW_AFTER)
            if not done:
                hung = await self._slow.watch(progress, job, began, self._unit_deadline, self._clock)
                if hung is not None:
                    self._quarantine(hung, job)
                if progress.abandoned:
                    return None
        except asyncio.CancelledError:
            progress.abandoned = True
            job.cancel()
            raise
        error = job.exception()
        return error if isinstance(error, Exception) else None

    async def _end_slow(self, since: float | None) -> None:
        """Wait for slow reads until something more urgent comes up. Quarantines units whose read hangs."""
        async for slow in self._slow.ended(self._unit_deadline, self._clock, self.schedule.asked):
            if slow.hangs is not None:
                self._quarantine(slow.unit, slow.hangs)
            elif slow.found.probes:
                await self._digest_probes(slow.found)
            else:
                await self._digest(slow.found, None, since)
            if slow.unit in self._read_again:
                self._read_again.discard(slow.unit)
                self.schedule.ask([slow.unit])
            self._waiting.end({u: cannot_read(u, e) for u, e in slow.found.failures.items()}, self._slow.reads.keys())

    def _rest(self, progress: Walk, units: Set[str] | None, todo: Todo) -> Set[str]:
        """The units that the walk has not covered; of those that are known, where listing failed."""
        if units is None:
            units = progress.listed if progress.listed is not None else todo.units | self.known.keys()
        done = progress.looks.keys() | progress.probes.keys() | progress.failures.keys()
        return units - done - self._hung.keys() - self._slow.reads.keys()

    def _hangs(self, unit: str) -> str:
        return hangs(unit, self._unit_deadline)

    def _quarantine(self, unit: str, job: asyncio.Future[None]) -> None:
        """Leave a unit alone whose read hangs, until its thread comes back; its devices are Unhealthy."""
        self._reports.report(unit, [Problem(unit or self.kind, self._hangs(unit))])
        self._hung[unit] = job
        self._waiting.hangs(unit, self._hangs(unit))
        job.add_done_callback(partial(self._release, unit))
        if signals := signals_of_hung(self._seen.hardware_in(unit), self._hangs(unit)):
            self._publish(Changes(self.kind, {}, {unit: signals}))
            self._seen.signals[unit] = signals

    def _release(self, unit: str, job: asyncio.Future[None]) -> None:
        """Look at a unit again whose thread has come back; at all units, if there was no thread left."""
        if not job.cancelled():
            job.exception()  # asyncio complains of an exception that nobody has asked for
        if self._hung.get(unit) is not job:
            return  # another read of it hangs by now
        del self._hung[unit]
        self.schedule.ask([unit] if unit and EVERY_UNIT not in self.problems else ALL)

    async def _digest(self, progress: Walk, failure: Exception | None, since: float | None) -> None:
        """Publish what a walk found that differs, take it in, and report what went wrong.

        Many devices take several steps of the loop, as if there had been several walks.
        """
        looks = progress.looks
        gone = self.known.keys() - progress.listed if progress.listed is not None else frozenset()
        changes = changes_of(self.kind, looks, gone, self._seen)
        different = bool(changes.units) or any(unit not in self.known for unit in looks)
        for part in changes.in_parts(BATCH):
            self._publish(replace(part, since=since))  # if that fails, the next scan finds it again
            looked = {unit: looks[unit] for unit in part.signals if unit in looks}
            self._seen.replace(looked, part.signals.keys() - looked.keys())
            if part.more:
                await asyncio.sleep(0)
        self._reports.walked(progress, failure)
        if different or "watches" in self.problems:
            await asyncio.sleep(0)  # the list goes first: `watches` may look at all that is known
            before = self.watched
            if self.watches() != before:
                self._on_watches()

    async def _digest_probes(self, progress: Walk) -> None:
        """Publish what probes said that they did not say before, and report what went wrong; in steps, as above."""
        signals = {unit: said for unit, said in progress.probes.items() if said is not None}
        for part in Changes(self.kind, {}, signals).in_parts(BATCH) if signals else ():
            self._publish(part)
            self._seen.signals.update(part.signals)
            if part.more:
                await asyncio.sleep(0)
        self._seen.glances.update(progress.glances)
        self._reports.walked(progress)

    def watches(self) -> Watches:
        """Ask the backend what the sources should listen to."""
        try:
            watches = ask(lambda: self.backend.watches(self.known))
            if watches != self.watched:
                self.watched = backend_answers.watches(self.backend, watches)
                self.schedule.poll = watches.poll
        except Exception as error:  # noqa: BLE001  # reported; it is asked again after the next scan, which is soon
            self._reports.report("watches", [Problem("watches", f"watches() failed: {shown(error)}")])
            self.schedule.retry(EVERY_UNIT)
        else:
            if "watches" in self.problems:
                self._reports.report("watches", [])
                if EVERY_UNIT not in self.problems:
                    self.schedule.is_well(EVERY_UNIT)
        return self.watched
