"""Watches the node: the kernel's sources, and for each backend a discoverer, which hears what its backend asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import anyio
import structlog
from anyio.abc import TaskGroup

from agent.config import AgentConfig
from agent.counting import Counts
from agent.devices.discovery import Discoverer
from agent.devices.looks import Walk
from agent.devices.making import is_made
from agent.devices.news import News
from agent.devices.records import Sightings, wants
from agent.devices.sources.base import Resync, Said
from agent.devices.sources.kmsg import KmsgSource
from agent.devices.sources.links import LinkSource
from agent.devices.sources.paths import PathSource
from agent.devices.sources.uevents import UeventSource
from agent.devices.waiting import LookError
from agent.runtime import patience
from agent.supervision import supervise
from agent.watchdog import Watchdog
from backends.base import ANY_SUBSYSTEM, Backend, Hint, Host, LinkChange, Record, Signal, Uevent, Watches

Recorded = Callable[[Sequence[Signal], Record], None]
"""Told what a record of the kernel's says about hardware."""

_INOTIFY, _KMSG, _LINKS, _UEVENTS = "inotify", "kernel's log", "network interfaces", "uevents"

_WAKE: Final = 2.0  # seconds for a look at everything after we did not run

log = structlog.get_logger()


@dataclass(slots=True)
class Outlook:
    """What another instance of a backend has found, beside the one in force."""

    backend: Backend[Any]
    discoverer: Discoverer
    """Of the one in force, or a new one."""
    found: Walk | None = None
    """None as long as it has not finished."""


class Watching:
    """The sources, the backends in force, and who looks at the node for each of them."""

    def __init__(
        self,
        settings: AgentConfig,
        host: Host,
        backends: Mapping[str, Backend[Any]],
        digest: Callable[[News], None],
        recorded: Recorded,
        watchdog: Watchdog,
        counts: Counts,
    ) -> None:
        """Prepare; `digest` is told what looking has found, the watchdog that the sources are alive."""
        self.backends = dict(backends)
        """By their kinds, as they are now."""
        self._settings = settings
        self._digest = digest
        self._recorded = recorded
        self._sightings = Sightings()
        self._counts = counts
        self._watches: dict[str, Watches] = {}
        self._tasks: TaskGroup  # of the running agent
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._pulses = {name: watchdog.pulse(name) for name in (_INOTIFY, _KMSG, _LINKS)}
        self._paths = PathSource(self.take, host, self._pulses[_INOTIFY].beat)
        self.kmsg = KmsgSource(self.take, host, beat=self._pulses[_KMSG].beat)
        self._links = LinkSource(self.take, beat=self._pulses[_LINKS].beat)
        self._uevents = None
        if settings.uevents != "off":
            pulse = self._pulses[_UEVENTS] = watchdog.pulse(_UEVENTS)
            self._uevents = UeventSource(self.take, host, settings.uevents, beat=pulse.beat, counts=counts)
        self.discoverers = {kind: self._discoverer(kind, backend) for kind, backend in self.backends.items()}

    def _discoverer(self, kind: str, backend: Backend[Any]) -> Discoverer:
        resync, probe = self._settings.resync, self._settings.probe
        return Discoverer(
            kind, backend, self._publish, resync=resync, probe=probe, on_watches=self._watch, counts=self._counts
        )

    # --- parts that run ---

    def start(self, tasks: TaskGroup) -> None:
        """Listen, and then look, so that nothing happens unseen in between."""
        for discoverer in self.discoverers.values():
            self._watches[discoverer.kind] = discoverer.watches()
        self._listen_to(self._all_watches())
        for name, source in {
            _INOTIFY: self._paths.run,
            _KMSG: self.kmsg.run,
            _LINKS: self._links.run,
        }.items():
            tasks.start_soon(supervise, name, source, self._pulses[name])
        if self._uevents is not None:
            tasks.start_soon(supervise, _UEVENTS, self._run_uevents, self._pulses[_UEVENTS])
        self._tasks = tasks
        for discoverer in self.discoverers.values():
            self._start(discoverer)

    def _start(self, discoverer: Discoverer) -> None:
        scope = self._scopes[discoverer.kind] = anyio.CancelScope()
        self._tasks.start_soon(_run, discoverer, scope)

    async def _run_uevents(self) -> None:
        assert self._uevents is not None
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._uevents.run)
            self._rescan()  # opening the socket took 30 ms, in which the first scan was under way

    async def looked(self) -> None:
        """Wait until every backend has had its first scan."""
        for discoverer in list(self.discoverers.values()):
            await discoverer.first_scan.wait()

    async def until(self, due: float | None, event: asyncio.Event, clock: Callable[[], float]) -> None:
        """Wait until this time, or for an event.

        Where we did not run until long after that, everything is looked at first, for what happened meanwhile.
        """
        with anyio.move_on_after(None if due is None else due - clock()):
            await event.wait()
        if due is None or (late := clock() - due) < patience.STEP + patience.LATE:
            return
        log.warning("stood-still", waited=round(late, 1), then="looking at everything before time counts")
        with anyio.move_on_after(_WAKE):
            async with anyio.create_task_group() as tasks:
                for discoverer in self.discoverers.values():
                    discoverer.rescan()
                    tasks.start_soon(_look_again, discoverer)

    async def caught_up(self) -> None:
        """Wait until what the kernel logged before we came has been told, if any backend wants it."""
        if self._all_watches().kernel_lines:
            await self.kmsg.caught_up.wait()

    # --- another configuration ---

    def set_timers(self, settings: AgentConfig) -> None:
        """Look and probe at these intervals from now on."""
        self._settings = settings
        for discoverer in self.discoverers.values():
            discoverer.schedule.set_timers(settings.resync, settings.probe)

    async def look_ahead(self, backends: Mapping[str, Backend[Any]], patience: float) -> list[Outlook]:
        """See what other instances of backends find, beside those in force, as far as they do in so many seconds."""
        outlooks = []
        for kind, backend in backends.items():
            discoverer = self.discoverers.get(kind) or self._discoverer(kind, backend)
            outlooks.append(Outlook(backend, discoverer))
        with anyio.move_on_after(patience):
            async with anyio.create_task_group() as tasks:
                for outlook in outlooks:
                    tasks.start_soon(_look_ahead, outlook)
        return outlooks

    def exchange(self, outlooks: Iterable[Outlook], gone: Iterable[str]) -> list[News]:
        """Go on with these instances, and without those backends; what that changes, for the caller to make known."""
        news = [self._leave(kind) for kind in gone]
        for outlook in outlooks:
            kind, discoverer = outlook.discoverer.kind, outlook.discoverer
            self.backends[kind] = outlook.backend
            is_new = kind not in self.discoverers
            self.discoverers[kind] = discoverer
            news.append(discoverer.exchange(outlook.backend, outlook.found))
            if is_new:
                self._start(discoverer)
        for told in news:
            asyncio.get_running_loop().call_soon(self._sight, told)  # once the caller has made it known
        return news

    def _leave(self, kind: str) -> News:
        discoverer = self.discoverers.pop(kind)
        del self.backends[kind], self._watches[kind]
        self._listen_to(self._all_watches())
        self._scopes.pop(kind).cancel()
        return discoverer.leave()

    # --- what the kernel says ---

    def take(self, said: Said) -> None:
        """A source has something to say."""
        if isinstance(said, Resync):
            log.warning("resync", reason=said.reason)
            self._rescan()
        elif isinstance(said, Record):
            self._take_record(said)
        else:
            for kind, discoverer in self.discoverers.items():
                if _concerns(said, self._watches[kind]):
                    discoverer.hint(said)

    def _take_record(self, record: Record) -> None:
        """The kernel told a fact: what it means holds until something ends it."""
        for kind, discoverer in self.discoverers.items():
            if wants(self._watches[kind], record):
                signals = self._sightings.known(discoverer.signals(record), record)
                if signals:
                    self._recorded(signals, record)

    def _publish(self, news: News) -> None:
        """Looking has found something: what was said of that before comes first, so that it is not Healthy for a moment."""
        self._sight(news)
        self._digest(news)

    def _sight(self, news: News) -> None:
        for signal, record in list(self._sightings.found(news)):
            self._recorded([signal], record)

    def _rescan(self) -> None:
        for discoverer in self.discoverers.values():
            discoverer.rescan()

    # --- what is listened to ---

    def _watch(self, kind: str, watches: Watches) -> None:
        """A backend wants to hear of something else from now on."""
        if self._watches.get(kind) == watches:
            return
        self._watches[kind] = watches
        self._listen_to(self._all_watches())

    def _all_watches(self) -> Watches:
        every = Watches()
        for watches in self._watches.values():
            every |= watches
        return every

    def _listen_to(self, watches: Watches) -> None:
        self._paths.watch(watches.directories)
        if self._uevents is not None:
            self._uevents.watch(watches.subsystems, watches.facts)
        self.kmsg.watch(watches.kernel_lines)
        self._links.watch(watches.links)


async def _run(discoverer: Discoverer, scope: anyio.CancelScope) -> None:
    with scope:
        await supervise(f"discovery of {discoverer.kind}", discoverer.run)


async def _look_again(discoverer: Discoverer) -> None:
    with suppress(LookError):  # what cannot be looked at has its own reasons
        await discoverer.look_at(discoverer.known)


async def _look_ahead(outlook: Outlook) -> None:
    if is_made(outlook.backend):
        outlook.found = await outlook.discoverer.look_ahead(outlook.backend)
    else:
        # nothing that an earlier instance found can be had through it
        outlook.found = Walk(listed=frozenset(), known=outlook.discoverer.known)


def _concerns(hint: Hint, watches: Watches) -> bool:
    if isinstance(hint, Uevent):
        return hint.subsystem in watches.subsystems or ANY_SUBSYSTEM in watches.subsystems
    if isinstance(hint, LinkChange):
        return watches.links
    return hint.path.parent in watches.directories or hint.path in watches.directories
