"""Runs the kernel's event sources and one discoverer per backend, and hands events to the backends that asked for them.

A hint makes units be read, whatever they turn out to be. A record is a fact: what it means is told at once, except where
another source has told the same fault, or no scan has found its hardware yet.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial, reduce
from operator import or_
from typing import Any, Final, Literal, Protocol, TypeVar

import anyio
import structlog
from anyio.abc import TaskGroup
from msgspec import Struct

from agent.discovery.backend_answers import why_unmade
from agent.discovery.discoverer import Discoverer, LookError
from agent.discovery.kmsg import KmsgSource
from agent.discovery.paths import PathSource
from agent.discovery.reading import Changes
from agent.discovery.sources import Emitted, Listening, Resync, boot_id
from agent.discovery.uevents import LinkSource, UeventSource
from agent.runtime import pacing
from agent.runtime.counts import Counts
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Problems
from agent.runtime.watchdog import Watchdog, supervise
from agent.runtime.workers import Workers
from backends.base import (
    ANY_SUBSYSTEM,
    Backend,
    Heard,
    Hint,
    Host,
    LinkChange,
    Record,
    Signal,
    Uevent,
    Verdict,
    Watches,
)
from backends.interface.values import minded

T = TypeVar("T")

SETTLE: Final = 2.0
"""Seconds that the first lists wait for the first scans and for what the kubelet remembers."""

_INOTIFY, _KMSG, _LINKS, _UEVENTS = "inotify", "kernel's log", "network interfaces", "uevents"

_LOG_FIRST: Final = 0.5
"""Seconds that what a backend heard waits for the kernel's log to tell the same; a line is read within milliseconds."""

_WAKE: Final = 2.0  # seconds for a look at everything after this process did not run for long

log = structlog.get_logger()


class Witness(Struct, frozen=True):
    """A source of records, for a person."""

    name: str
    complaint: str
    """Why it is not heard; empty if it is."""
    needed: bool = True
    """Whether it should be heard now."""


class Settings(Protocol):
    """What is configured of it."""

    @property
    def resync(self) -> float:
        """Seconds between two looks at everything."""

    @property
    def probe(self) -> float:
        """Seconds between two probes of all that is known."""

    @property
    def uevents(self) -> Literal["kernel", "udev", "off"]:
        """Who tells of hot-plug."""


class FindingSink(Protocol):
    """The part of the daemon that hears what is found."""

    discoverers: dict[str, Discoverer]
    """Those in force, by their backends."""

    def scanned(self, changes: Changes) -> None:
        """A scan found something different."""

    def recorded(self, signals: Sequence[Signal], record: Record) -> None:
        """A record means this."""

    def note_looks(self) -> None:
        """A backend has begun to look at all its units, or has looked at them."""

    async def looked(self) -> None:
        """Wait until every backend has had its first scan."""

    def is_left_alone(self, hardware: str, by: str) -> bool:
        """Whether an operator has drained it, or a resource of another backend than `by` has it."""


class DiscoveryRunner:
    """Runs the sources, and a discoverer for each backend in force."""

    def __init__(
        self,
        settings: Settings,
        host: Host,
        backends: dict[str, Backend[Any]],
        node: FindingSink,
        watchdog: Watchdog,
        counts: Counts,
        problems: Problems | None = None,
    ) -> None:
        """Prepare; `node` is told what scans find and what records mean, the watchdog that the sources are alive."""
        self.backends = backends
        """By their kinds, always as they are now."""
        self._node = node
        self._early, self._faults = EarlySignals(), Faults()
        self._counts = counts
        self._problems = problems = problems or Problems()
        self._keep = partial(supervise, problems=problems)
        self._host = host
        self._listening: dict[Discoverer, tuple[Listening, anyio.CancelScope]] = {}
        self._listeners: dict[str, Workers] = {}  # by backend: those that hang count for a next instance, too
        self._tasks: TaskGroup  # of the running agent
        self._scopes: dict[Discoverer, anyio.CancelScope] = {}
        self._pulses = {name: watchdog.pulse(name) for name in (_INOTIFY, _KMSG, _LINKS)}
        self._paths = PathSource(self.take, host, self._pulses[_INOTIFY].beat, problems)
        self.kmsg = KmsgSource(
            self.take, host, beat=self._pulses[_KMSG].beat, on_complaint=self._listen, problems=problems
        )
        self._links = LinkSource(self.take, beat=self._pulses[_LINKS].beat)
        self._uevents = None
        if settings.uevents != "off":
            pulse = self._pulses[_UEVENTS] = watchdog.pulse(_UEVENTS)
            self._uevents = UeventSource(self.take, host, settings.uevents, beat=pulse.beat, counts=counts)
        self.discoverers = node.discoverers
        self.discoverers.update({kind: self._discoverer(kind, it, settings) for kind, it in self.backends.items()})

    def _discoverer(self, kind: str, backend: Backend[Any], settings: Settings) -> Discoverer:
        """A discoverer for this instance. What it finds is published while it is in force."""
        made = Discoverer(
            kind,
            backend,
            lambda changes: self._publish(made, changes),
            resync=settings.resync,
            probe=settings.probe,
            on_watches=lambda: self._watch(made),
            counts=self._counts,
            before=self.discoverers.get(kind),
        )
        return made

    # --- parts that run ---

    def start(self, tasks: TaskGroup, after: tuple[str, int] | None = None) -> None:
        """Start sources and discoverers; once a source listens that did not before the first scan, all is looked at again.

        `after` is a boot, and the number of the last line of its log that an earlier run has handled.
        """
        self._tasks = tasks
        for discoverer in self.discoverers.values():
            discoverer.watches()
        self.listen()
        heard = self._uevents is not None and self._uevents.listen()
        for name, source in {
            _INOTIFY: self._paths.run,
            _KMSG: partial(self.kmsg.run, after),
            _LINKS: self._links.run,
        }.items():
            tasks.start_soon(self._keep, name, source, self._pulses[name])
        if self._uevents is not None:
            tasks.start_soon(self._keep, _UEVENTS, partial(self._run_uevents, heard=heard), self._pulses[_UEVENTS])
        self._node.note_looks()
        for discoverer in self.discoverers.values():
            self._start(discoverer)
            tasks.start_soon(self._end_first_look, discoverer)

    async def _end_first_look(self, discoverer: Discoverer) -> None:
        await discoverer.first_scan.wait()
        self._node.note_looks()

    def _start(self, discoverer: Discoverer) -> None:
        scope = self._scopes[discoverer] = anyio.CancelScope()
        self._tasks.start_soon(self._run, discoverer, scope)

    async def _run(self, discoverer: Discoverer, scope: anyio.CancelScope) -> None:
        with scope:
            await self._keep(f"discovery of {discoverer.kind}", discoverer.run)

    async def _run_uevents(self, *, heard: bool) -> None:
        assert self._uevents is not None
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._uevents.run)
            if not heard:  # udevd's socket took 30 ms, in which the first scan was under way
                self._rescan()

    async def settle(self, ask_kubelet: Callable[[], Awaitable[None]]) -> None:
        """Wait, `SETTLE` at most, for what the kubelet remembers, the first scans, and what the kernel logged before."""
        with anyio.move_on_after(SETTLE):
            await ask_kubelet()
            await self._node.looked()
            if any(discoverer.watched.kernel_lines for discoverer in self.discoverers.values()):
                await self.kmsg.caught_up.wait()
        _tell_of_slow(self.discoverers)

    async def until(self, due: float | None, bell: Doorbell, clock: Callable[[], float]) -> None:
        """Wait until the time `due`, or for a ring.

        Where this process did not run until long after that, everything is looked at first: much may have happened.
        """
        self._listen()  # what was drained, or has another owner, may be other hardware
        await bell.rung(math.inf if due is None else due - clock())
        if due is None or (late := clock() - due) < pacing.STEP + pacing.LATE:
            return
        log.warning("stood-still", waited=round(late, 1), then="looking at everything before time counts")
        with anyio.move_on_after(_WAKE):
            async with anyio.create_task_group() as tasks:
                for discoverer in self.discoverers.values():
                    discoverer.rescan()
                    tasks.start_soon(_look_again, discoverer)

    # --- another configuration ---

    def stuck(self) -> set[str]:
        """The backends of which a reload should make another instance: they could not be started, or are stuck."""
        return {kind for kind, it in self.discoverers.items() if it.is_stuck or why_unmade(it.backend)}

    @asynccontextmanager
    async def on_trial(
        self, backends: Mapping[str, Backend[Any]], settings: Settings
    ) -> AsyncIterator[dict[str, Discoverer]]:
        """Have these instances look at the node beside those in force, for `SETTLE` at most; then the body runs.

        Instances that are not in force when it ends are stopped.
        """
        fresh = {kind: self._discoverer(kind, backend, settings) for kind, backend in backends.items()}
        try:
            for discoverer in fresh.values():
                self._start(discoverer)
            with anyio.move_on_after(SETTLE):
                for discoverer in fresh.values():
                    await discoverer.first_scan.wait()
            _tell_of_slow(fresh)
            yield fresh
        finally:
            for kind, discoverer in fresh.items():
                if self.discoverers.get(kind) is not discoverer:
                    self._scopes.pop(discoverer).cancel()
                    if kind not in self.discoverers:
                        self._counts.discovery.pop(kind, None)

    def exchange(self, discoverers: Mapping[str, Discoverer]) -> None:
        """Put these into force and stop all others; what their threads still find is dropped."""
        gone = [it for kind, it in self.discoverers.items() if discoverers.get(kind) is not it]
        for kind in self.discoverers.keys() - discoverers.keys():
            self._counts.discovery.pop(kind, None)
        _become(self.discoverers, discoverers)
        _become(self.backends, {kind: it.backend for kind, it in discoverers.items()})
        for discoverer in gone:
            discoverer.leave()
            self._scopes.pop(discoverer).cancel()

    def sight_soon(self, changes: Changes) -> None:
        """Record the early signals of this hardware in the next turn of the loop, when the caller has published it."""
        asyncio.get_running_loop().call_soon(self._sight, changes)

    # --- what the kernel says ---

    def take(self, emitted: Emitted) -> None:
        """Take what a source hands on: a hint, a record, or that some were lost."""
        if isinstance(emitted, Resync):
            log.warning("resync", reason=emitted.reason)
            self._rescan()
        elif isinstance(emitted, Record):
            for discoverer in self.discoverers.values():
                if wants(discoverer.watched, emitted):
                    self._tell(discoverer, emitted)
        else:
            for discoverer in self.discoverers.values():
                if _asked_for(discoverer.watched, emitted):
                    discoverer.hint(emitted)

    def _tell(self, discoverer: Discoverer, record: Record) -> None:
        """Tell the node what a record means to one backend, where no other source has told it."""
        now = time.monotonic()
        signals = [
            it
            for it in discoverer.signals(record)
            if self._faults.note(it, record.source, now) and not self._keep_if_early(it, record)
        ]
        if signals:
            self._node.recorded(signals, record)

    def _take_heard(self, discoverer: Discoverer, heard: Heard) -> None:
        """Tell the node what a backend heard by a way of its own; its time is now, since only that is known.

        The log comes first, where it is read: it has the words, the process, and a right that a library may lack.
        """
        now = time.monotonic()
        record = Record(heard.source, boot_id(self._host), int(now * 1e6), now, heard.text, heard.properties)
        is_logged = discoverer.watched.kernel_lines and self.kmsg.complaint == ""
        asyncio.get_running_loop().call_later(_LOG_FIRST if is_logged else 0.0, self._tell_heard, discoverer, record)

    def _tell_heard(self, discoverer: Discoverer, record: Record) -> None:
        if self.discoverers.get(discoverer.kind) is discoverer:
            self._tell(discoverer, record)

    def _keep_if_early(self, signal: Signal, record: Record) -> bool:
        """Keep a signal whose hardware no scan has found until one does; returns whether it is kept."""
        if record.source != "kmsg" or any(it.sees(signal.hardware) for it in self.discoverers.values()):
            return False
        self._early.keep(signal, record)
        return True

    def _publish(self, finder: Discoverer, changes: Changes) -> None:
        """Tell the node what a scan found; early signals first, so that no device is Healthy for a moment that is not."""
        if self.discoverers.get(finder.kind) is finder:
            if self._early.by_hardware:
                self._sight(changes)
            self._node.scanned(changes)

    def _sight(self, changes: Changes) -> None:
        for signal, record in list(self._early.take(changes)):
            self._node.recorded([signal], record)

    def _rescan(self) -> None:
        for discoverer in self.discoverers.values():
            discoverer.rescan()

    # --- what is listened to ---

    def _watch(self, finder: Discoverer) -> None:
        """Listen to what a backend in force asks for from now on."""
        if self.discoverers.get(finder.kind) is finder:
            self.listen()

    def listen(self) -> None:
        """Have the sources listen to what the backends in force asked for."""
        watches = reduce(or_, (discoverer.watched for discoverer in self.discoverers.values()), Watches())
        self._paths.watch(watches.directories)
        if self._uevents is not None:
            self._uevents.watch(watches.subsystems, watches.facts)
        self.kmsg.watch(watches.kernel_lines)
        self._links.watch(watches.links)
        self._listen()

    def _listen(self) -> None:
        """Have each backend in force listen to the hardware that it asked for, and to no other."""
        wanted = {it: hardware for it in self.discoverers.values() if (hardware := self._hearable(it))}
        for discoverer, (listening, scope) in list(self._listening.items()):
            if wanted.get(discoverer) != listening.hardware:
                scope.cancel()
                del self._listening[discoverer]
        for discoverer in wanted.keys() - self._listening.keys():
            workers = self._listeners.setdefault(discoverer.kind, Workers(f"{discoverer.kind}'s listening"))
            take = partial(self._take_heard, discoverer)
            listening = Listening(discoverer.backend, wanted[discoverer], take, workers, self._problems)
            scope = anyio.CancelScope()
            self._listening[discoverer] = listening, scope
            self._tasks.start_soon(self._run_listening, listening, scope)

    async def _run_listening(self, listening: Listening, scope: anyio.CancelScope) -> None:
        with scope:
            await self._keep("listening", listening.run)

    def _hearable(self, discoverer: Discoverer) -> frozenset[str]:
        """The hardware that a backend should listen to now.

        An open library keeps a driver in use. So hardware is left alone that an operator has drained, to unload the driver
        say, or that a resource of another backend has, which may want to bind another driver.
        """
        watched = discoverer.watched
        asked = watched.listen | (watched.listen_without_log if self.kmsg.complaint else frozenset())
        return frozenset(name for name in asked if not self._node.is_left_alone(name, discoverer.kind))

    def witnesses(self) -> Iterator[Witness]:
        """The sources of records that backends asked for, and whether each is heard."""
        if any(it.watched.kernel_lines for it in self.discoverers.values()):
            complaint = "it has not been read yet" if self.kmsg.complaint is None else self.kmsg.complaint
            yield Witness("the kernel's log", complaint)
        for it in self.discoverers.values():
            if it in self._listening:
                yield Witness(it.backend.hears, self._listening[it][0].complaint)
            elif it.watched.listen_without_log and not self.kmsg.complaint:
                yield Witness(it.backend.hears, "the kernel's log tells the same", needed=False)
            elif it.watched.listen or it.watched.listen_without_log:
                yield Witness(it.backend.hears, "all its hardware is drained, or another backend's", needed=False)


def _tell_of_slow(discoverers: Mapping[str, Discoverer]) -> None:
    for kind, discoverer in discoverers.items():
        if not discoverer.first_scan.is_set():
            log.warning("backend-slow", backend=kind, waited=SETTLE, then="going on without it")


async def _look_again(discoverer: Discoverer) -> None:
    with suppress(LookError):  # its problem is reported
        await discoverer.look_at(discoverer.known)


def _become(mine: dict[str, T], theirs: Mapping[str, T]) -> None:
    """Change a mapping in place, since others have it."""
    mine.clear()
    mine.update(theirs)


# --- which records are for which backend, told once, and kept until their hardware is found ---


_EARLY_HARDWARE: Final = 256
_EARLY_SIGNALS: Final = 16  # of each


def _asked_for(watches: Watches, hint: Hint) -> bool:
    if isinstance(hint, Uevent):
        return hint.subsystem in watches.subsystems or ANY_SUBSYSTEM in watches.subsystems
    if isinstance(hint, LinkChange):
        return watches.links
    return hint.path.parent in watches.directories or hint.path in watches.directories


def wants(watches: Watches, record: Record) -> bool:
    """Whether a backend that watches this asked for the record. The sources hand on what any backend asked for."""
    if record.source == "kmsg":
        message = record.message
        return any(message.startswith(text) for text in watches.kernel_lines)
    if watches.facts.isdisjoint(record.properties):
        return False
    return record.properties.get("SUBSYSTEM") in watches.subsystems or ANY_SUBSYSTEM in watches.subsystems


WITHIN: Final = 10.0
"""Seconds between two reports of one fault: the log is read again up to so long after a short failure."""

_SEVERITY: Final = (Verdict.NOTE, Verdict.INFO, Verdict.DEGRADED, Verdict.DELAYED, Verdict.NOW)
_FAULTS: Final = 256
_REPORTS: Final = 64  # of each


class Report(Struct, frozen=True):
    """A fault that happened once, and who told it."""

    since: float
    """When the first of them told it: monotonic seconds."""
    sources: frozenset[str]
    verdict: Verdict
    """The strictest that it was told with."""


def told(reports: tuple[Report, ...], source: str, verdict: Verdict, now: float) -> tuple[tuple[Report, ...], bool]:
    """The reports of a fault with one more from this source; and whether it is news, since no other source told it.

    Each source tells a fault once. So what it tells again is another one, and what it tells joins the first that it has not
    told yet. Where it says worse of it than the others did, that is news, too: a line of the log has words, NVML a number.
    """
    recent = tuple(it for it in reports if now - it.since <= WITHIN)[-_REPORTS:]
    for number, it in enumerate(recent):
        if source not in it.sources:
            is_worse = _SEVERITY.index(verdict) > _SEVERITY.index(it.verdict)
            joined = Report(it.since, it.sources | {source}, verdict if is_worse else it.verdict)
            return (*recent[:number], joined, *recent[number + 1 :]), is_worse
    return (*recent, Report(now, frozenset({source}), verdict)), True


class Faults:
    """The faults of the last seconds, for telling what several sources say of one of them once."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[Report, ...]] = {}

    def note(self, signal: Signal, source: str, now: float) -> bool:
        """Note that a source tells of the signal's fault; True if no other did, or none so badly, and always without a fault."""
        if not signal.fault or signal.verdict not in _SEVERITY:
            return True
        reports = self._reports.pop(signal.fault, ())
        self._reports[signal.fault], is_news = told(reports, source, signal.verdict, now)
        if len(self._reports) > _FAULTS:
            del self._reports[next(iter(self._reports))]
        return is_news


class EarlySignals:
    """The signals of hardware that no scan has found yet: a line of the kernel's log may come before that scan.

    There is room for few, so that a flood of records about hardware that does not exist costs no memory; the oldest go.
    """

    def __init__(self) -> None:
        self.by_hardware: dict[str, list[tuple[Signal, Record]]] = {}

    def keep(self, signal: Signal, record: Record) -> None:
        """Keep a signal until its hardware is found; of those with the same reason, the last one."""
        others = [it for it in self.by_hardware.pop(signal.hardware, ()) if it[0].reason != signal.reason]
        self.by_hardware[signal.hardware] = [*others[1 - _EARLY_SIGNALS :], (signal, record)]
        if len(self.by_hardware) > _EARLY_HARDWARE:
            del self.by_hardware[next(iter(self.by_hardware))]

    def take(self, changes: Changes) -> Iterator[tuple[Signal, Record]]:
        """Yield the signals of the hardware that a scan found, in the order in which they came, and forget them."""
        for unit, devices in changes.units.items():
            for name in minded((*devices, *changes.beside.get(unit, ()))):
                yield from self.by_hardware.pop(name, ())
