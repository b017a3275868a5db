"""Runs one gRPC server per resource in our directory, registers each, and holds the directory's lock.

While it has the lock, this agent is the only one of the node: it also writes the state, ends claims, undoes what was done for
pods and prepares hardware (`SoleAgent`).
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import structlog
from anyio.abc import TaskGroup
from msgspec import Struct

from agent import __version__
from agent.daemon.dra import Dra
from agent.daemon.handover import Giver
from agent.daemon.nfd_file import FeatureFile
from agent.daemon.node import Node
from agent.discovery import runner
from agent.discovery.paths import POLL, Change, DirectoryWatch
from agent.discovery.sources import Beat
from agent.hardware.adoption import Adopter
from agent.hardware.jobs import Jobs
from agent.hardware.reconciler import Reconciler
from agent.kubelet import witnesses
from agent.kubelet.allocation import Allocator, Prefer, Preferences, PreStart, Starter
from agent.kubelet.handover_socket import Predecessor, Relay, Standby, Standbys
from agent.kubelet.kubelet_socket import Kubelet
from agent.kubelet.lock import Lock, exclusive, identity, remove_leftovers
from agent.kubelet.plugin import Plugin
from agent.kubelet.registration import Registrar
from agent.kubelet.rivals import LostResources
from agent.kubernetes.runner import KubernetesParts
from agent.runtime import limits
from agent.runtime.counts import Counts
from agent.runtime.errors import words
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Problems
from agent.runtime.watchdog import Notifier, supervise
from backends.errors import reason_of

# --- what only one agent of a node does ---


class SoleAgent(Struct, frozen=True):
    """The parts that run while this agent is the only one."""

    node: Node
    lost_resources: LostResources
    reconciler: Reconciler
    adopter: Adopter
    jobs: Jobs
    kubernetes: KubernetesParts
    dra: Dra
    features: FeatureFile | None
    problems: Problems

    async def catch_up(self) -> None:
        """Read what the agent before us gave to pods, and was told, while we waited for its lock."""
        await self.node.restore()
        with anyio.move_on_after(runner.SETTLE):
            await self.node.pod_claims.ask()

    async def run(self) -> None:
        """Run all of it until cancelled; then another agent may."""
        node, keeper = self.node, self.node.keeper
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "claims": node.pod_claims.run,
            "lost resources": self.lost_resources.run,
            "hardware": self.reconciler.run,
            "history": partial(node.history.run, keeper.write_history),
            "notes of hardware": node.history.notes.run,
            "Kubernetes": self.kubernetes.run,
            "CDI": node.cdi.run,
            "DRA": self.dra.run,
        }
        if self.features is not None:
            parts["features"] = self.features.run
        await keeper.begin()
        try:
            async with anyio.create_task_group() as tasks:
                for part, run in parts.items():
                    tasks.start_soon(partial(supervise, part, run, problems=self.problems))
                tasks.start_soon(self._prepare_hardware)
        finally:
            await keeper.end()
            self.jobs.close()

    async def _prepare_hardware(self) -> None:
        await self.adopter.adopt_what_is_new()
        await self.node.resumer.resume()


_DIRECTORY_RETRY: Final = 1.0  # seconds
_TAKEN_WITHIN: Final = 5.0  # seconds in which the kubelet registers all that was handed over, if it runs and is well

log = structlog.get_logger()


class _ReplacedError(Exception):
    """Our lock counts no more: the plugin directory was removed, and perhaps made again, or another agent took its lock back."""


class PluginFactory(Struct, frozen=True):
    """The parts that answer the kubelet's calls, for all resources."""

    allocator: Allocator
    preferences: Preferences
    starter: Starter
    lost_resources: LostResources
    counts: Counts
    record: Callable[[], object]
    """Identifies the last writing of the kubelet's record."""

    def plugin(self, name: str, lock: Lock) -> Plugin:
        """The service of this resource; it gives nothing once another agent has put its lock into the place of ours."""
        give, hooks, confirm = self.allocator.allocate, self.hooks(name), self.lost_resources.confirm
        return Plugin(name, give, *hooks, confirm=confirm, counts=self.counts, record=self.record, lock=lock)

    def hooks(self, name: str) -> tuple[Prefer | None, PreStart | None]:
        """What answers the calls that a resource may ask the kubelet for, as it is configured now."""
        return self.preferences.of(name), self.starter.of(name)


class Serving:
    """The plugin directory, its lock, and the server and registration of each resource."""

    def __init__(
        self,
        plugin_dir: Path,
        node: Node,
        notifier: Notifier,
        factory: PluginFactory,
        sole_agent: SoleAgent,
        counts: Counts,
        lost_resources: LostResources,
        beat: Beat,
        problems: Problems,
        *,
        shares_http: bool,
    ) -> None:
        """Prepare.

        Args:
            plugin_dir: the kubelet's directory for sockets.
            node: has the lists, and the services that hand them on.
            notifier: is told what we wait for.
            factory: makes a resource's service.
            sole_agent: what only the one agent of a node may do.
            counts: has the registrations.
            lost_resources: looks after the resources that another plugin takes.
            beat: the sign of life of `watch`.
            problems: is told what fails and is started again, and what cannot be watched.
            shares_http: whether HTTP is served at a port, which the agent before us may have.
        """
        self.kubelet = Kubelet(plugin_dir / "kubelet.sock")
        self.registrars = lost_resources.registrars
        self._node, self.plugins = node, node.plugins
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._plugin_dir = plugin_dir
        self._notifier = notifier
        self._factory, self._sole_agent = factory, sole_agent
        self._counts = counts
        self.lost_resources = lost_resources
        self._directory = DirectoryWatch(self._directory_changed, self.kubelet.look, beat, problems)
        self._ours = plugin_dir / limits.SOCKET_DIRECTORY
        self._directory.watch(frozenset({plugin_dir, self._ours}))
        self._directory_news = Doorbell()
        self._names: tuple[str, ...] = ()
        self._names_changed = Doorbell()
        self._keep_running = partial(supervise, problems=problems)
        self._unusable = problems.trouble(
            "plugin directory", "nothing can be served", "plugin-directory-unusable",
            directory=str(self._ours), then="trying again until it is usable",
        )  # fmt: skip
        self._full = problems.trouble(
            "kubelet disk", "the kubelet refuses each pod that asks for devices, for good", "kubelet-disk-full",
            "kubelet-disk-has-room", level="error", directory=str(plugin_dir), then="make room there",
        )  # fmt: skip
        self._leaving: set[str] = set()
        self._awaited = ""
        self._owner = ""  # which agent served before us, until we know what it knew
        self.standbys = Standbys()
        self.predecessor = Predecessor(self._ours, lambda: f"{os.getpid()} {__version__}")
        self._shares_http = shares_http
        self._is_giving, self._giving = False, asyncio.Lock()
        self._lost: tuple[Giver, Standby] | None = None
        self._acting, self._acts, self._may_act = anyio.CancelScope(), asyncio.Lock(), asyncio.Event()
        self._back = asyncio.Event()
        self._reported = Doorbell()

    # --- what is served ---

    @property
    def waiting_for(self) -> str:
        """Why nothing is served, as systemd is told; empty if nothing keeps it from being served."""
        if self.is_standing_by:
            return f"standing by: process {self._owner} serves this node, and hands it over when it is told to end"
        if self._awaited:
            return f"waiting for {self._awaited}"
        if self.kubelet.complaint:
            return f"waiting for the kubelet, which does not answer at {self.kubelet.socket}: {self.kubelet.complaint}"
        if not self.kubelet.generation:
            return f"waiting for {self.kubelet.socket}"
        return ""

    @property
    def is_standing_by(self) -> bool:
        """Whether another agent serves the node, and knows that this one is ready to take over."""
        return bool(self._awaited) and self.predecessor.knows_us

    @property
    def status(self) -> str:
        """What the daemon is doing, as systemd is told."""
        if self._awaited or not self.kubelet.generation:
            return self.waiting_for
        registered = sum(registrar.registered for registrar in self.registrars.values())
        return f"{registered} of {len(self.registrars)} resources registered"

    def follow(self, names: Sequence[str]) -> None:
        """Serve these resources and no others."""
        self._names = tuple(names)
        if set(names) != self.plugins.keys():
            self._names_changed.set()

    def configure(self, names: Iterable[str]) -> None:
        """Take over the new configuration of these resources; where their options differ, register them again."""
        for name in names:
            if (plugin := self.plugins.get(name)) is not None and plugin.set_hooks(*self._factory.hooks(name)):
                log.info("options-changed", resource=name)
                self.registrars[name].renew()

    # --- parts that run ---

    async def watch(self) -> None:
        """Watch for the kubelet's socket, for ever; also where no event tells of it."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._directory.run)
            while True:
                self.kubelet.look()
                self._look_for_room()
                await anyio.sleep(POLL)

    async def run(self) -> None:
        """Serve every resource, as the only agent; start over where the lock does not count any more."""
        while True:
            directory = None
            self._directory_news.clear()
            try:
                directory = identity(self._make_directory())
                await self._run()
            except* OSError as errors:
                await self._wait_until_usable(errors)
            except* _ReplacedError:
                if identity(self._ours) == directory:
                    log.warning("taken-back", file=str(self._ours / "lock"), then="standing by")
                else:
                    log.warning(
                        "plugin-directory-replaced",
                        directory=str(self._ours),
                        then="starting over, as the only agent there",
                    )

    async def _run(self) -> None:
        async with self._alone(self._ours / "lock") as lock:
            await self.predecessor.decided(with_listeners=self._shares_http and not self.standbys.listeners)
            self._check(lock)
            is_given = self.predecessor.gives  # it may be killed from now on
            remove_leftovers(self._ours)
            if self._owner or self._is_giving:
                await self._sole_agent.catch_up()
                self._check(lock)
                self._owner = ""
            self.kubelet.look()
            if not self.kubelet.generation:
                log.info("waiting-for-kubelet", socket=str(self.kubelet.socket))
            self._report()
            try:
                async with self.standbys.listening(self._ours), anyio.create_task_group() as tasks:
                    self._unusable.healed()
                    self._lock, self._is_giving, self._lost = lock, False, None
                    self._may_act.set()
                    self._back.set()
                    tasks.start_soon(self._act)
                    tasks.start_soon(self._mind_lock, lock)
                    if is_given:
                        tasks.start_soon(self._tell_when_all_are_registered)
                        tasks.start_soon(self._clean_up_after_predecessor)
                    while True:
                        if not self._is_giving:  # else the standby decides
                            self._follow_names(tasks)
                        await self._names_changed.rung()
            finally:
                self.registrars.clear()
                self.plugins.clear()
                self._scopes.clear()
                self._leaving.clear()

    # --- from one agent to the next ---

    async def _act(self) -> None:
        """Run what only one agent of a node may do, whenever this one is it."""
        while True:
            while not self._may_act.is_set():
                await self._may_act.wait()
            async with self._acts:
                with anyio.CancelScope() as self._acting:
                    await self._keep_running("claims", self._run_alone)

    async def _run_alone(self) -> None:
        if self._lost is not None:
            await self._act_again(*self._lost)
        await self._sole_agent.run()

    async def _act_again(self, giver: Giver, lost: Standby) -> None:
        """Be the one agent of the node again, once the disk lets us."""
        while True:
            self._directory_news.clear()
            try:
                self._lock.take_back()
                await self.standbys.listen(self._ours)
                break
            except OSError as error:
                await self._wait_until_usable(error)
        self._unusable.healed()
        self._awaited = ""
        self.standbys.dismiss(lost)  # it looks at its lock then
        await self._sole_agent.catch_up()
        giver.go_on()
        self._lost, self._is_giving = None, False
        self._names_changed.set()
        self._back.set()

    async def _stop_acting(self) -> None:
        self._is_giving = True
        self._may_act.clear()
        self._acting.cancel()
        async with self._acts:
            pass

    async def hand_over(self, pid: int | None = None) -> bool:
        """Hand the node to the first standby that is ready, or to that process; False if it was lost: we serve on."""
        async with self._giving:  # a command and a signal may both ask for it
            if self._is_giving:
                return True
            if (standby := self.standbys.ready(pid)) is None:
                return False
            giver = Giver(self.registrars, self.plugins, Relay(self._plugin_dir), self._lock, self._stop_acting)
            if await giver.give(standby):
                return True
            giver.take_back()
            await self._stop_acting()  # it may have begun to take over before we stopped
            self._lost = giver, standby
            self._back.clear()
            self._may_act.set()
            await self._back.wait()
            return False

    async def _tell_when_all_are_registered(self) -> None:
        """Tell the agent before us once all resources are registered, or after `_TAKEN_WITHIN` seconds."""
        await self._reported.until(lambda: all(it.registered for it in self.registrars.values()), _TAKEN_WITHIN)
        self.predecessor.done()

    async def _clean_up_after_predecessor(self) -> None:
        """Remove what the agent before us left, if it was killed while it handed over."""
        await self.predecessor.gone()
        remove_leftovers(self._ours)

    # --- the directory ---

    def _check(self, lock: Lock) -> None:
        if not lock.is_in_place:
            raise _ReplacedError

    async def _mind_lock(self, lock: Lock) -> None:
        """Watch that the lock file is the one that we hold: in a directory that was made again, another agent may hold another.

        Without a socket of the kubelet nothing is given up: pods get devices by the open streams alone.

        Raises:
            _ReplacedError: it is another file, or gone.
        """
        while lock.is_in_place or not self.kubelet.socket.exists():
            await self._directory_news.rung(POLL)
        raise _ReplacedError

    @asynccontextmanager
    async def _alone(self, lock: Path) -> AsyncIterator[Lock]:
        """Hold the lock: be the only agent of this directory."""

        def wait(pid: str) -> None:
            log.warning("another-agent-runs", file=str(lock), pid=pid, then="waiting until it is gone")
            self._owner = pid
            self._unusable.healed()
            self.wait_for(f"{lock}, which process {pid} has: another Fairlead runs")
            self.predecessor.ready()

        self.predecessor.stand_by()
        self.wait_for(str(lock))
        async with exclusive(lock, wait, self.predecessor.wait) as ours:
            self._awaited = ""
            if ours.waited:
                log.info("took-over", file=str(lock))
            yield ours

    def _directory_changed(self, path: Path, change: Change) -> None:
        if path in (self._plugin_dir, self._ours, self._ours / "lock", self.kubelet.socket):
            self._directory_news.set()
        if self._plugin_dir in (path, path.parent):
            self.lost_resources.changed(path)
        if path == self.kubelet.socket and change is Change.CREATED:
            self.kubelet.look()

    def _make_directory(self) -> Path:
        """Make our directory in the kubelet's.

        Raises:
            OSError: it cannot be made, or is a link.
        """
        try:
            self._ours.mkdir(mode=0o750, exist_ok=True)
        except FileNotFoundError as error:
            error.filename = str(self._plugin_dir)  # is not there, or is a link to what is not
            raise
        if self._ours.is_symlink():
            raise OSError(errno.ELOOP, "It is a symbolic link", str(self._ours))
        return self._ours

    async def _wait_until_usable(self, error: BaseException) -> None:
        """Report why our directory, or a file in it, cannot be made, and wait for news of it or `_DIRECTORY_RETRY` seconds."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, OSError)
        self.wait_for(f"{error.filename or self._ours}: {reason_of(error)}")
        self._unusable.report_once(words(error))
        await self._directory_news.rung(_DIRECTORY_RETRY)

    def _look_for_room(self) -> None:
        """Report a disk on which the kubelet cannot write its record: it refuses every pod for good then (kubelet contract: A11.3)."""
        if lack := witnesses.lack_of_room(self._plugin_dir):
            self._full.report_once(lack)
        else:
            self._full.healed()

    # --- the servers ---

    def _follow_names(self, tasks: TaskGroup) -> None:
        """Start a server for each wanted name that has none, and stop those of other names."""
        for name in self.registrars.keys() - set(self._names):
            self._scopes.pop(name).cancel()
            self._leaving.add(name)
            del self.registrars[name], self.plugins[name]
            self._counts.forget(name)
            log.info("resource-retired", resource=name)
        for name in self._names:
            if name not in self.registrars and name not in self._leaving:
                self._serve(name, tasks)  # a name that is back waits for its old server's end: never two streams (A2)

    def _serve(self, name: str, tasks: TaskGroup) -> None:
        plugin = self.plugins[name] = self._factory.plugin(name, self._lock)
        registrar = Registrar(plugin, self.kubelet, self._plugin_dir, self._counts, self.predecessor)
        registrar.on_change = partial(self._registration_changed, registrar)
        self.registrars[name], self._scopes[name] = registrar, anyio.CancelScope()
        if (snapshot := self._node.lists.get(name)) is not None:
            plugin.publish(snapshot)
        tasks.start_soon(self._keep, name, registrar.run, self._scopes[name])

    async def _keep(self, name: str, run: Callable[[], Awaitable[None]], scope: anyio.CancelScope) -> None:
        """Serve a resource until its scope is cancelled."""
        with scope:
            await self._keep_running(name, run)
        self._leaving.discard(name)
        self._names_changed.set()

    def wait_for(self, what: str) -> None:
        """Note what the start waits for, and tell systemd; empty: nothing."""
        self._awaited = what
        self._notifier.status(self.waiting_for)

    def _registration_changed(self, registrar: Registrar) -> None:
        if not registrar.registered:
            self._node.pod_claims.stream_ended()
        self._report()

    def _report(self) -> None:
        """Tell systemd, where it asks, how many resources are registered."""
        if self._notifier.address is not None:
            self._notifier.status(self.status)
        self._reported.set()
