"""Wires the house together, and is the only place that does: what starts after what, who tells whom, how it ends.

Start: configuration → discovery and claims (`SETTLE` at most) → READY → directory, lock, sockets, registration.
Stop: streams end normally, sockets go; threads that hang hold nothing up. One supervised task for each part.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import structlog
from anyio.abc import TaskGroup

from agent import limits
from agent.config import Config
from agent.devices.claims import Ledger
from agent.devices.discovery import Discoverer, News
from agent.devices.health import HealthBook
from agent.devices.inventory import Inventory
from agent.devices.model import Held, Snapshot
from agent.devices.releases import Releaser
from agent.devices.sources.base import Resync
from agent.devices.sources.paths import Change, DirectoryWatch, PathSource
from agent.devices.sources.uevents import UeventSource
from agent.devices.state import StateFile
from agent.devices.telling import tell
from agent.kubelet.allocation import Allocator
from agent.kubelet.lock import exclusive, remove_leftovers
from agent.kubelet.plugin import Plugin
from agent.kubelet.registration import Kubelet, Registrar
from agent.kubelet.witnesses import Witnesses
from agent.notify import Notifier
from agent.supervision import supervise
from backends.base import ANY_SUBSYSTEM, Backend, Hint, Uevent, Watches

SETTLE: Final = 2.0
"""Seconds that first scans, and the kubelet's memory, may take before resources are listed without them."""

_DIRECTORY_RETRY: Final = 1.0  # seconds
_TELL_AFTER: Final = 0.002  # seconds from a change to its line in the log: the kubelet is told first

log = structlog.get_logger()


class Agent:
    """The daemon: every part, and what flows between them."""

    def __init__(self, config: Config, backends: Mapping[str, Backend[Any]], notifier: Notifier) -> None:
        """Prepare; `backends` has an instance for every kind that the config names."""
        settings = config.agent
        self.config = config
        self.inventory = Inventory(config.resources, backends)
        self.discoverers = {kind: self._discoverer(kind, backend) for kind, backend in backends.items()}
        self._health = HealthBook()
        self._health_changed = asyncio.Event()
        self._ledger = Ledger()
        self._state = StateFile(settings.state_dir)
        self._releaser = Releaser(config.host, backends, self._ledger)
        self._notifier = notifier
        self._watches: dict[str, Watches] = {}
        self._uevents = None if settings.uevents == "off" else UeventSource(self._take, config.host, settings.uevents)
        self._paths = PathSource(self._take, config.host)
        self._kubelet = Kubelet(settings.plugin_dir / "kubelet.sock")
        self._directory = DirectoryWatch(self._directory_changed, self._kubelet.look)
        self._directory_news = asyncio.Event()
        workers = {kind: discoverer.workers for kind, discoverer in self.discoverers.items()}
        self._allocator = Allocator(self.inventory, backends, workers, self._record)
        self._witnesses = Witnesses(
            self._ledger,
            settings.kubelet_root / "pod-resources" / "kubelet.sock",
            settings.plugin_dir,
            served=self._served,
            devices=lambda slot: found.device if (found := self.inventory.slot(*slot)) else None,
            began=self._claims_began,
            ended=self._claims_ended,
            resend=self._resend,
        )
        self._tasks: TaskGroup  # of the running agent
        self._lists: dict[str, Snapshot] = {}
        self._omitted: dict[str, int] = {}
        self._broken: dict[str, str] = {}
        self._plugins: dict[str, Plugin] = {}
        self._registrars: dict[str, tuple[Registrar, anyio.CancelScope]] = {}
        self._leaving: set[str] = set()
        self._names_changed = asyncio.Event()

    def _discoverer(self, kind: str, backend: Backend[Any]) -> Discoverer:
        settings = self.config.agent
        return Discoverer(
            kind, backend, self._digest, resync=settings.resync, probe=settings.probe, on_watches=self._watch
        )

    # --- start and stop ---

    async def run_until_signal(self) -> None:
        """Run until SIGTERM or SIGINT.

        What the start made lives as long as the process, and is kept out of the garbage collector's sight: walking
        its 50,000 objects would stop the loop for 20 ms now and then.
        """
        log.info("starting", config=str(self.config.source or "none; KubeVirt's devices"))
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop, scope, number)
            loop.add_signal_handler(signal.SIGHUP, _cannot_reload)  # its default would end us
            await self.run(gc.freeze)
        log.info("stopped")

    def _stop(self, scope: anyio.CancelScope, number: int) -> None:
        log.info("stopping", signal=signal.Signals(number).name)
        self._notifier.stopping()
        scope.cancel()

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Run until cancelled; `on_ready` is called before the first registration."""
        if self.config.http_listen is not None:
            log.warning("http-not-served", listen=self.config.http_listen, reason="this version has no HTTP face yet")
        async with anyio.create_task_group() as self._tasks:
            self._start_sources()
            for kind, discoverer in self.discoverers.items():
                self._tasks.start_soon(supervise, f"discovery of {kind}", discoverer.run)
            self._tasks.start_soon(supervise, "health", self._ripen)
            await self._settle()
            log.info("ready", resources=self.inventory.names())
            self._notifier.ready(f"waiting for {self._kubelet.socket}")
            on_ready()
            self._tasks.start_soon(supervise, "kubelet", self._serve)

    def _start_sources(self) -> None:
        """Listen before looking, so that nothing happens unseen in between."""
        for discoverer in self.discoverers.values():
            self._watches[discoverer.kind] = discoverer.watches()
        self._listen_to(self._all_watches())
        self._directory.watch(frozenset({self.config.agent.plugin_dir}))
        for name, source in {"inotify": self._paths.run, "kubelet's directory": self._run_directory}.items():
            self._tasks.start_soon(supervise, name, source)
        if self._uevents is not None:
            self._tasks.start_soon(supervise, "uevents", self._run_uevents)

    async def _run_uevents(self) -> None:
        assert self._uevents is not None
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._uevents.run)
            self._rescan()  # opening the socket took 30 ms, in which the first scan was under way

    async def _run_directory(self) -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._directory.run)
            self._kubelet.look()

    async def _remember(self) -> None:
        """Claims of an earlier run, as we kept them and as the kubelet remembers them."""
        kept = self._state.read()
        self._ledger.restore(kept.claims, time.monotonic())
        self.inventory.claim(kept.claims)
        await self._witnesses.ask()

    async def _settle(self) -> None:
        """Give our memory and every backend's first scan their time."""
        with anyio.move_on_after(SETTLE):
            await self._remember()
            for discoverer in self.discoverers.values():
                await discoverer.first_scan.wait()
        for kind, discoverer in self.discoverers.items():
            if not discoverer.first_scan.is_set():
                log.warning("backend-slow", backend=kind, waited=SETTLE, then="listing what is known so far")
            self.inventory.ready(kind)
        self._flush()

    # --- from the kernel to the lists ---

    def _take(self, hint: Hint | Resync) -> None:
        """A source has something to say."""
        if isinstance(hint, Resync):
            log.warning("resync", reason=hint.reason)
            self._rescan()
            return
        for kind, discoverer in self.discoverers.items():
            if _concerns(hint, self._watches[kind]):
                discoverer.hint(hint)

    def _rescan(self) -> None:
        for discoverer in self.discoverers.values():
            discoverer.rescan()

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
            self._uevents.watch(watches.subsystems)

    def _digest(self, news: News) -> None:
        """Discovery found something different."""
        self.inventory.update(news.backend, news.units)
        self.inventory.set_health(self._health.probed(news.backend, news.signals, time.monotonic()))
        self._flush()
        self._health_changed.set()  # after the streams were woken: they go first
        for resource, why in self.inventory.broken.items() - self._broken.items():
            log.error("resource-broken", resource=resource, backend=news.backend, reason=why)
        self._broken = dict(self.inventory.broken)

    async def _ripen(self) -> None:
        """Let time pass for delayed signals."""
        while True:
            now = time.monotonic()
            self.inventory.set_health(self._health.ripen(now))
            self._flush()
            self._health_changed.clear()
            deadline = self._health.next_deadline(now)
            with anyio.move_on_after(None if deadline is None else deadline - now):
                await self._health_changed.wait()

    def _flush(self) -> None:
        """Hand the lists that changed to their plugins, and say what happened."""
        for snapshot in self.inventory.take():
            before = self._lists.get(snapshot.resource)
            self._lists[snapshot.resource] = snapshot
            if (plugin := self._plugins.get(snapshot.resource)) is not None:
                plugin.publish(snapshot)
            # after the streams have sent it, which takes them two turns of the loop
            asyncio.get_running_loop().call_later(_TELL_AFTER, tell, before.slots if before else None, snapshot)
            self._note_omitted(snapshot.resource)
        if set(self.inventory.names()) != self._plugins.keys():
            self._names_changed.set()

    def _note_omitted(self, resource: str) -> None:
        """Say it when more or fewer IDs are left out than before, loudly."""
        omitted = self.inventory.omitted(resource)
        if omitted != self._omitted.get(resource, 0):
            log.error("list-too-long", resource=resource, omitted=omitted, limit=limits.MESSAGE_LIMIT)
        self._omitted[resource] = omitted

    # --- claims ---

    def _served(self) -> dict[str, str]:
        """The resources that are ours, with their backends."""
        retiring = {held.resource: held.backend for held in self._ledger.held()}
        return retiring | {resource.name: resource.spec.backend for resource in self.config.resources}

    async def _record(self, given: Sequence[Held]) -> None:
        """An Allocate is about to give these."""
        changed = self._ledger.allocate(given, time.monotonic())
        self.inventory.claim(given)
        if changed:
            await self._state.write(self._ledger.held())
        self._witnesses.allocated()

    def _claims_began(self, news: Sequence[Held]) -> None:
        self.inventory.claim(news)
        self._after_claims_changed()

    def _claims_ended(self, ended: Sequence[Held]) -> None:
        log.info("claims-ended", slots=[f"{held.resource}/{held.id}" for held in ended])
        self.inventory.unclaim(ended)
        self._after_claims_changed()
        self._tasks.start_soon(self._releaser.release, ended)

    def _after_claims_changed(self) -> None:
        self._flush()
        self._tasks.start_soon(self._state.write, self._ledger.held())

    def _resend(self, resource: str) -> None:
        self.inventory.touch(resource)
        self._flush()

    # --- the kubelet ---

    def _directory_changed(self, path: Path, change: Change) -> None:
        self._directory_news.set()
        if path == self._kubelet.socket and change is Change.CREATED:
            self._kubelet.look()

    async def _serve(self) -> None:
        """Serve every resource, in our directory, as the only agent there."""
        ours = await self._make_directory()
        self._notifier.status(f"waiting for {ours / 'lock'}")
        async with exclusive(ours / "lock") as waited:
            remove_leftovers(ours)
            if waited:
                await self._catch_up()
            self._kubelet.look()
            if not self._kubelet.generation:
                log.info("waiting-for-kubelet", socket=str(self._kubelet.socket))
            self._report()
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(supervise, "claims", self._witnesses.run)
                    while True:
                        self._names_changed.clear()
                        self._follow_names(tasks)
                        await self._names_changed.wait()
            finally:
                self._registrars.clear()
                self._plugins.clear()
                self._leaving.clear()

    async def _catch_up(self) -> None:
        """Learn what the agent before us gave while we waited for it to go."""
        with anyio.move_on_after(SETTLE):
            await self._remember()
        self._flush()

    async def _make_directory(self) -> Path:
        """Wait for the plugin directory and make ours in it."""
        ours = self.config.agent.plugin_dir / limits.SOCKET_DIRECTORY
        complaint = ""
        while True:
            self._directory_news.clear()
            try:
                ours.mkdir(mode=0o750, exist_ok=True)
            except OSError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    self._notifier.status(f"waiting for {ours.parent}: {error}")
                    log.warning("plugin-directory-unusable", error=complaint, then="trying again until it is usable")
            else:
                return ours
            with anyio.move_on_after(_DIRECTORY_RETRY):
                await self._directory_news.wait()

    def _report(self) -> None:
        """Tell systemd what we are at."""
        if not self._kubelet.generation:
            self._notifier.status(f"waiting for {self._kubelet.socket}")
            return
        registered = sum(registrar.registered for registrar, _ in self._registrars.values())
        self._notifier.status(f"{registered} of {len(self._registrars)} resources registered")

    def _follow_names(self, tasks: TaskGroup) -> None:
        """Have a server for each resource of the inventory, and for no other."""
        names = self.inventory.names()
        for name in self._registrars.keys() - set(names):
            self._registrars.pop(name)[1].cancel()
            self._leaving.add(name)
            self._plugins.pop(name)
            self._lists.pop(name, None)
            log.info("resource-retired", resource=name)
        for name in names:
            if name in self._registrars or name in self._leaving:
                continue  # a name that is back waits for its old server's end: never two streams (A2)
            plugin = self._plugins[name] = Plugin(name, self._allocator.allocate)
            registrar = Registrar(plugin, self._kubelet, self.config.agent.plugin_dir, self._endpoint(name))
            registrar.on_change = self._report
            scope = anyio.CancelScope()
            self._registrars[name] = registrar, scope
            if (snapshot := self._lists.get(name)) is not None:
                plugin.publish(snapshot)
            tasks.start_soon(self._keep, name, registrar, scope)

    async def _keep(self, name: str, registrar: Registrar, scope: anyio.CancelScope) -> None:
        """Serve a resource until its scope is cancelled."""
        with scope:
            await supervise(name, registrar.run)
        self._leaving.discard(name)
        self._names_changed.set()

    def _endpoint(self, name: str) -> str:
        """The resource's socket, relative to the plugin directory."""
        ours = self.config.agent.plugin_dir / limits.SOCKET_DIRECTORY
        room = limits.SOCKET_PATH_LIMIT - len(os.fsencode(ours)) - 1
        return f"{limits.SOCKET_DIRECTORY}/{limits.socket_name(name, room)}"


def _cannot_reload() -> None:
    log.warning("not-reloaded", reason="this version reads its configuration at its start only", then="restart it")


def _concerns(hint: Hint, watches: Watches) -> bool:
    if isinstance(hint, Uevent):
        return hint.subsystem in watches.subsystems or ANY_SUBSYSTEM in watches.subsystems
    return hint.path.parent in watches.directories or hint.path in watches.directories
