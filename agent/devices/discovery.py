"""Keeps one backend's devices current: hints and timers in, what changed out.

A scan covers units: all of them at the start, after an overflow and on a slow timer, else those a hint
affects. What a scan covered is replaced; a unit that could not be read keeps what was known and is
tried again. A unit whose read hangs is quarantined until its thread comes back, and the walk goes on
without it in another thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import structlog

from agent.devices.looks import Look, NonsenseError, Walk, checked_units, walk
from agent.devices.workers import NoWorkerError, Workers
from backends.base import ALL, ANY_SUBSYSTEM, All, Backend, Device, Hint, Problem, Signal, Watches
from backends.known import Known

UNIT_DEADLINE: Final = 5.0
"""Seconds after which a read is taken to hang."""

_RETRY_FIRST, _RETRY_MOST = 1.0, 60.0  # seconds before a failed unit is tried again, doubling

_CALLS = ("affects", "watches")  # problems that belong to a call, not to a unit

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class News:
    """What a scan changed, for inventory and health."""

    backend: str
    units: Mapping[str, tuple[Device, ...]]
    """Units whose devices differ from before; an empty tuple is a unit that is gone."""
    signals: Mapping[str, tuple[Signal, ...]]
    """Every unit that was looked at, with all that its probes said; nothing of a unit that is gone."""


@dataclass(slots=True)
class _Todo:
    """What the next scan covers."""

    everything: bool = False
    units: set[str] = field(default_factory=set)

    def add(self, units: Iterable[str] | All) -> None:
        if units is ALL:
            self.everything = True
        else:
            self.units.update(units)

    def __bool__(self) -> bool:
        return self.everything or bool(self.units)


class Discoverer:
    """One backend's eyes: what it saw last, and what has to be looked at again."""

    def __init__(
        self,
        kind: str,
        backend: Backend[Any],
        publish: Callable[[News], None],
        *,
        resync: float = 300.0,
        probe: float = 30.0,
        unit_deadline: float = UNIT_DEADLINE,
        on_watches: Callable[[str, Watches], None] = lambda _kind, _watches: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self.backend = backend
        self.workers = Workers(kind)
        self.known = Known()
        self.problems: dict[str, tuple[Problem, ...]] = {}
        """Per unit ("" for the backend as a whole)."""
        self._publish = publish
        self._on_watches = on_watches
        self._resync, self._probe, self._unit_deadline = resync, probe, unit_deadline
        self._clock = clock
        self._todo = _Todo(everything=True)
        self._wake = asyncio.Event()
        self.first_scan = asyncio.Event()
        """Set when the first full scan has come to its end."""
        self._hung: dict[str, asyncio.Future[None]] = {}
        self._retries: dict[str, tuple[float, float]] = {}  # unit → when, the delay after that

    # --- what makes it look ---

    def hint(self, hint: Hint) -> None:
        """Something happened somewhere: look at the units it affects. Called for every event; cheap."""
        try:
            affected = self.backend.affects(hint, self.known)
            units = affected if affected is ALL else checked_units(affected)
        except Exception as error:  # noqa: BLE001  # reported; a full scan sees what the hint meant
            if "affects" not in self.problems:  # hints come by the thousand, and each would have its own sentence
                self._report("affects", [Problem("affects", f"affects() failed on {hint}: {error!r}")])
            units = ALL
        if units:
            self._ask(units)

    def rescan(self) -> None:
        """Look at everything again."""
        self._ask(ALL)

    def _ask(self, units: Iterable[str] | All) -> None:
        self._todo.add(units)
        self._wake.set()

    async def run(self) -> None:
        """Look whenever there is a reason to, for ever; started again after a failure, at everything."""
        self._todo.add(ALL)
        next_resync = self._clock() + self._resync
        next_probe = self._clock() + self._probe
        try:
            while True:
                await self._wait_until(min(next_resync, next_probe, *(at for at, _ in self._retries.values())))
                now = self._clock()
                if now >= next_resync:
                    self._todo.everything = True
                    next_resync = now + self._resync
                if now >= next_probe:
                    self._todo.units.update(self.known)
                    next_probe = now + self._probe
                self._collect_retries(now)
                todo, self._todo = self._todo, _Todo()
                if todo:
                    await self._scan(todo)
        finally:
            self.workers.close()

    async def _wait_until(self, moment: float) -> None:
        if not self._todo:
            try:
                async with asyncio.timeout(max(0.0, moment - self._clock())):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()

    def _collect_retries(self, now: float) -> None:
        for unit in [unit for unit, (at, _) in self._retries.items() if at <= now]:
            _, delay = self._retries[unit]
            self._retries[unit] = (now + delay, min(delay * 2, _RETRY_MOST))
            if unit:
                self._todo.units.add(unit)
            else:
                self._todo.everything = True

    # --- one scan ---

    async def _scan(self, todo: _Todo) -> None:
        """Walk what is to be looked at; where a read hangs, publish what is there and go on without it."""
        units: Set[str] | None = todo.units - self._hung.keys()
        if todo.everything:  # as long as the listing itself hangs, that is what is known
            units = None if "" not in self._hung else (todo.units | self.known.keys()) - self._hung.keys()
        while units is None or units:
            progress = Walk()
            try:
                job = self.workers.start(
                    partial(walk, self.backend, units, frozenset(self._hung), self.known, progress, self._clock)
                )
            except NoWorkerError as error:
                self._report("", [Problem(self.kind, f"{error}; its devices are shown as they were last seen")])
                self._retry("", failed=True)
                break
            progress.since = self._clock()
            failure = await self._finish(job, progress)
            self._digest(progress, failure)
            if not progress.abandoned:
                break
            units = self._rest(progress, units)
        if todo.everything:
            self.first_scan.set()

    async def _finish(self, job: asyncio.Future[None], progress: Walk) -> Exception | None:
        """Wait for a walk's end, or until one of its reads hangs; the error that ended it, if one did."""
        while not job.done():
            left = progress.since + self._unit_deadline - self._clock()
            if left <= 0:
                progress.abandoned = True
                self._quarantine(progress.unit or "", job)
                return None
            try:
                await asyncio.wait([job], timeout=left)
            except asyncio.CancelledError:
                progress.abandoned = True
                job.cancel()
                raise
        error = job.exception()
        return error if isinstance(error, Exception) else None

    def _rest(self, progress: Walk, units: Set[str] | None) -> Set[str]:
        planned = progress.listed or frozenset() if units is None else units
        return planned - progress.looks.keys() - progress.failures.keys() - self._hung.keys()

    def _quarantine(self, unit: str, job: asyncio.Future[None]) -> None:
        what = f"reading {unit}" if unit else "listing its units"
        sentence = f"{what} has hung for {self._unit_deadline:g} s; it is left alone until the read returns"
        self._report(unit, [Problem(unit or self.kind, sentence)])
        self._hung[unit] = job
        job.add_done_callback(partial(self._release, unit))

    def _release(self, unit: str, job: asyncio.Future[None]) -> None:
        """The thread that hung has come back: look at the unit again, at all of them if there was no thread left."""
        del self._hung[unit]
        if not job.cancelled():
            job.exception()  # whatever it was; asyncio complains of one that nobody read
            self._ask([unit] if unit and "" not in self.problems else ALL)

    def _digest(self, progress: Walk, failure: Exception | None) -> None:
        """Replace what the walk covered, publish what is different, note what went wrong."""
        looks, failures, listed = dict(progress.looks), dict(progress.failures), progress.listed
        changed = {unit: look.discovery.devices for unit, look in looks.items() if look.changed}
        if listed is not None:
            changed.update(dict.fromkeys(self.known.keys() - listed, ()))
            for unit in self.problems.keys() - listed - {"", *_CALLS}:
                self._report(unit, [])
                self._retries.pop(unit, None)
        self._publish(_news(self.kind, changed, looks))  # if that fails, all this is found again
        fresh = {unit for unit in looks if unit not in self.known}  # `looks` is short, `known` may not be
        for unit in changed.keys() | fresh:  # in place: a walk's thread only ever gets single units from it
            if listed is None or unit in listed:
                self.known[unit] = looks[unit].discovery.devices
            else:
                del self.known[unit]
        self._note(looks, failures, failure, whole=listed is not None)
        if changed or fresh:
            self._on_watches(self.kind, self.watches())

    def _note(
        self,
        looks: Mapping[str, Look],
        failures: Mapping[str, BaseException],
        failure: Exception | None,
        *,
        whole: bool,
    ) -> None:
        for unit, look in looks.items():
            self._report(unit, look.discovery.problems)
            self._retries.pop(unit, None)
        for unit, error in failures.items():
            self._report(unit, [Problem(unit, f"{unit} cannot be read: {_words(error)}")])
            self._retry(unit, failed=True)
        if failure is not None:
            self._report("", [Problem(self.kind, f"backend {self.kind} cannot list its units: {_words(failure)}")])
            self._retry("", failed=True)
        elif whole:
            self._report("", [])
            self._retry("", failed=False)

    def _retry(self, unit: str, *, failed: bool) -> None:
        if not failed:
            self._retries.pop(unit, None)
        elif unit not in self._retries:
            self._retries[unit] = (self._clock() + _RETRY_FIRST, _RETRY_FIRST * 2)

    def watches(self) -> Watches:
        """What the sources should listen to for this backend."""
        try:
            watches = self.backend.watches(self.known)
            if not isinstance(watches, Watches):
                raise NonsenseError(f"returned {watches!r} where Watches are due")
            if ANY_SUBSYSTEM in watches.subsystems and type(self.backend).affects is Backend.affects:
                raise NonsenseError("asks for every event of the node, and affects() does not say what each is about")
        except Exception as error:  # noqa: BLE001  # reported; the slow timer still looks
            self._report("watches", [Problem("watches", f"watches() failed: {error!r}")])
            return Watches()
        self._report("watches", [])
        return watches

    def _report(self, unit: str, problems: Iterable[Problem]) -> None:
        """Keep what is wrong with a unit, and say it once, when it changes."""
        before, after = self.problems.get(unit, ()), tuple(problems)
        if before == after:
            return
        if after:
            self.problems[unit] = after
            for problem in (problem for problem in after if problem not in before):
                log.warning("discovery-problem", backend=self.kind, subject=problem.subject, problem=problem.sentence)
        else:
            del self.problems[unit]
            log.info("discovery-problem-solved", backend=self.kind, subject=unit or self.kind)


def _news(kind: str, changed: Mapping[str, tuple[Device, ...]], looks: Mapping[str, Look]) -> News:
    gone = dict.fromkeys(changed.keys() - looks.keys(), ())
    return News(kind, changed, {unit: look.signals for unit, look in looks.items()} | gone)


def _words(error: BaseException) -> str:
    return str(error) or repr(error)
