"""Wires the daemon's parts together, and is the only place that does: what starts after what, who calls whom, how it ends.

Start: configuration → discovery and claims (`SETTLE` at most) → READY → directory, lock, sockets, registration.
Stop: streams end normally, sockets go; threads that hang hold nothing up. One supervised task for each part.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import time
from collections.abc import Callable, Container, Mapping, Sequence, Set
from functools import partial
from types import ModuleType
from typing import Any, Final

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskGroup

from agent.cdi.on_demand import Cdi
from agent.claims.foreign_claims import Tracer
from agent.claims.ledger import Ledger
from agent.config import AgentConfig, Config
from agent.console import views
from agent.console.names import node_name
from agent.console.service import serve
from agent.daemon import successor
from agent.daemon.boot import wait_for_held
from agent.daemon.configuration_swap import ConfigurationSwap
from agent.daemon.control import AgentControl, Parts
from agent.daemon.discovery_runner import DiscoveryRunner
from agent.daemon.node import Node
from agent.daemon.publisher import Publisher
from agent.daemon.reload import Change, Reloader
from agent.daemon.reporting.event_log import Events
from agent.daemon.reporting.feature_file import FeatureFile
from agent.daemon.reporting.list_warnings import ListWarnings
from agent.daemon.serving import Serving
from agent.daemon.state_file import StateFile
from agent.daemon.state_keeper import StateKeeper
from agent.discovery.sources.base import boot_id
from agent.hardware.adoption import Adopter
from agent.hardware.jobs import Jobs
from agent.hardware.queue import HardwareQueue
from agent.hardware.reconciler import Reconciler
from agent.hardware.releases import Releaser
from agent.hardware.resumption import Resumer
from agent.health import HealthBook
from agent.history.recorder import Recorder
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import Shortfall
from agent.kubelet.allocation import Allocator
from agent.kubelet.lost_resources import LostResources
from agent.kubelet.plugin import Plugin
from agent.kubelet.pods import checkpoint
from agent.kubelet.pods.pod_claims import PodClaims
from agent.kubelet.preference import Preferences
from agent.kubelet.prestart import Starter
from agent.kubernetes.faces import Faces
from agent.model import Held, Slot, SlotKey, Snapshot
from agent.placement.admission import Admission
from agent.runtime import garbage
from agent.runtime.counts import Counts
from agent.runtime.supervision.notify import Notifier
from agent.runtime.supervision.problems import Problems
from agent.runtime.supervision.restarts import supervise
from agent.runtime.supervision.watchdog import Watchdog
from agent.runtime.version import version
from backends.base import Backend, Clears

SETTLE: Final = 2.0
"""Seconds that first scans, and the kubelet's memory, may take before resources are listed without them."""

LEAVE: Final = 20.0
"""Seconds that an agent which was told to end waits for a standby that is there to take over; less than what ends it."""

_REPLY: Final = 0.1  # seconds in which the answer to who asked has left
_STARTED: Final = 1.0  # seconds in which the start is over

log = structlog.get_logger()


class Agent:
    """The daemon: every part, and what flows between them."""

    def __init__(
        self,
        config: Config,
        backends: Mapping[str, Backend[Any]],
        notifier: Notifier,
        events: Events | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Prepare.

        Args:
            config: what is configured.
            backends: an instance for every kind that the config names.
            notifier: is told how the service is doing.
            events: what the log tells.
            clock: monotonic seconds.
            wall: seconds since the epoch.
        """
        settings = config.agent
        self._clock, self._wall = clock, wall
        self.problems = Problems(clock)
        """What the daemon's parts report."""
        self._keep = partial(supervise, problems=self.problems)
        self.counts = Counts()
        self.watchdog = Watchdog(notifier, problems=self.problems, lateness=self.counts.lateness.observe)
        backends = dict(backends)  # those in force, always: a reload exchanges them in place
        self.inventory, health, ledger = (
            Inventory(config.resources, backends),
            HealthBook(boot_id(config.host)),
            Ledger(),
        )
        self._jobs = Jobs(HardwareQueue(clock), self._look_at)
        owners = self.inventory, health, ledger
        self.node = Node(*owners, self._jobs.turns, self._prepare_what_is_new, clock=clock, wall=wall)
        self._reconciler = Reconciler(self._jobs.turns, self.problems)
        self._releaser = Releaser(config.host, backends, ledger, self._reconciler, self.node.keep_claims)
        self._shortfall = Shortfall(self.inventory, clock, wall)
        seen = self.inventory, self._list_of, self._pods, self._shortfall
        self._history = Recorder(*seen, clock=clock, wall=wall)
        kept = ledger, self._releaser, self.inventory, health, self._shortfall, self._history
        self._keeper = StateKeeper(StateFile(settings.state_dir), *kept, clock=clock, wall=wall)
        self.node.releaser, self.node.keeper = self._releaser, self._keeper
        self._discovery = DiscoveryRunner(
            settings, config.host, backends, self.node, self.watchdog, self.counts, self.problems
        )
        self.discoverers = self._discovery.discoverers
        self._kubernetes = self._make_kubernetes(config)
        told = self._shortfall, self._keeper.write_offered, self._kubernetes
        self._list_warnings = ListWarnings(self.inventory, self.discoverers, *told)
        self._adopter = Adopter(backends, self._reconciler, self._look_at)
        self._notifier = notifier
        features = settings.nfd_features.path
        self._features = None if features is None else FeatureFile(features, self._slots, problems=self.problems)
        admission = Admission(partial(checkpoint.version, settings.plugin_dir), clock)
        self._preferences = Preferences(self.inventory, backends, admission)
        self._cdi = Cdi(config.host, settings.state_dir, self.inventory, backends, self.problems)
        giving = self.inventory, backends, self._jobs, self._record
        self._allocator = Allocator(*giving, cdi=self._cdi, admission=admission)
        self._starter = self._make_starter(backends)
        self._pod_claims = self._make_pod_claims(settings)
        acting = self._reconciler, self._look_at, self._pod_claims.know
        self._resumer = Resumer(backends, self.inventory, ledger, *acting)
        self._kubelet_watch = self.watchdog.pulse("kubelet's directory")
        self._serving = self._make_serving(settings)
        listeners = self._adopter, self._list_warnings, self._features, self.counts, self._kubernetes
        self.node.publisher = Publisher(
            self.inventory, self._serving, *listeners, self._pod_claims, self._history, self._cdi
        )
        self._configuration_swap = self._make_configuration_swap(config)
        self._reloader = Reloader(
            lambda: self.config,
            self._discovery.stuck,
            self._apply,
            notifier,
            lambda: self._serving.status,
            self.problems,
        )
        self.control = self._make_control(backends, events or Events())
        """What the faces ask."""
        self._tasks: TaskGroup  # of the running agent
        self._scope, self._is_leaving = anyio.CancelScope(), False

    def _make_starter(self, backends: Mapping[str, Backend[Any]]) -> Starter:
        return Starter(
            self.inventory,
            self.node.ledger,
            backends,
            self._jobs,
            health=lambda hardware, reset: self.node.health.to_holder(
                hardware, self._clock(), Clears.OUR_RESET if reset else None
            ),
            was_reset=self.node.was_reset,
        )

    def _make_serving(self, settings: AgentConfig) -> Serving:
        return Serving(
            settings.plugin_dir,
            self._notifier,
            self._plugin,
            catch_up=self._catch_up,
            alongside=self._mind_claims,
            counts=self.counts,
            lost_resources=LostResources(settings.pod_resources, settings.plugin_dir),
            beat=self._kubelet_watch.beat,
            problems=self.problems,
        )

    def _make_pod_claims(self, settings: AgentConfig) -> PodClaims:
        return PodClaims(
            self.node.ledger,
            settings.pod_resources,
            settings.plugin_dir,
            names=self.inventory.names,
            served=self.inventory.kind,
            tracer=Tracer(self.inventory),
            devices=self.inventory.device,
            began=self.node.adopted,
            ended=self._released,
            settled=self.node.claims_settled,
            resend=self.node.resend,
            asked=self._history.claims_changed,
            clock=self._clock,
            problems=self.problems,
        )

    def _list_of(self, name: str) -> Snapshot | None:
        return self._serving.list_of(name)

    def _pods(self, slot: SlotKey) -> list[str]:
        return [f"{it.namespace}/{it.pod}" for it in self._pod_claims.holders.get(slot, ())]

    def _released(self, ended: Sequence[Held]) -> None:
        self.node.released(ended)
        self._resumer.over(ended)
        self._cdi.changed(held.resource for held in ended)

    def _make_kubernetes(self, config: Config) -> Faces:
        return Faces(
            config.kubernetes,
            node_name(),
            self.inventory,
            self.node.health,
            self.node.drain,
            self.node.undrain,
            self._slots,
            lambda: self._shortfall.missing,
            self.problems,
            clock=self._clock,
            wall=self._wall,
        )

    def _make_configuration_swap(self, config: Config) -> ConfigurationSwap:
        return ConfigurationSwap(
            config,
            self._discovery,
            self.inventory,
            self._serving,
            self._preferences,
            self._starter,
            self._adopter,
            self._list_warnings,
            self._jobs,
            self.node,
        )

    @property
    def config(self) -> Config:
        """What is in force."""
        return self._configuration_swap.config

    def _make_control(self, backends: Mapping[str, Backend[Any]], events: Events) -> AgentControl:
        return AgentControl(
            Parts(
                self._configuration,
                self.node,
                backends,
                self.discoverers,
                self._adopter,
                self._serving,
                self._pod_claims,
                events,
                self.problems,
                self._shortfall,
                self._history,
                self.reload,
                self._replace,
            ),
            clock=self._clock,
            wall=self._wall,
        )

    async def _confirm(self, resource: str, listed: Callable[[], Container[str]]) -> None:
        """What is to be known before each list."""
        await self._serving.lost_resources.before_list(resource)
        if strangers := await self._pod_claims.confirm(resource, listed):
            self._serving.lost_resources.suspect(resource, strangers)

    def _plugin(self, name: str) -> Plugin:
        hooks = self._allocator.allocate, self._preferences.of(name), self._starter.of(name)
        return Plugin(name, *hooks, confirm=self._confirm, counts=self.counts)

    # --- start and stop ---

    async def run_until_signal(self) -> None:
        """Run until SIGTERM or SIGINT."""
        garbage.settle()  # what has been imported: nobody has to walk over it while thousands of devices are found
        log.info("starting", file=str(self.config.source or "none; KubeVirt's devices"))
        loop = asyncio.get_running_loop()
        with self._scope as scope:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop, scope, number)
            loop.add_signal_handler(signal.SIGHUP, self._reloader.request)
            loop.call_later(_STARTED, version)  # later, what is installed may be another one
            await self.run(garbage.settle)
        log.info("stopped")

    def _stop(self, scope: anyio.CancelScope, number: int) -> None:
        log.info("stopping", signal=signal.Signals(number).name)
        if self._serving.standbys.any and not self._is_leaving:
            self._is_leaving = True
            self._tasks.start_soon(self._leave, scope)
            return
        self._notifier.stopping()
        scope.cancel()

    async def _leave(self, scope: anyio.CancelScope) -> None:
        """End once a standby serves in our place, or none is there any more."""
        with anyio.move_on_after(LEAVE):
            standbys = self._serving.standbys
            while await standbys.come() and not await self._serving.hand_over():
                if standbys.any and not standbys.ready():
                    await standbys.changed()
        self._notifier.stopping()
        scope.cancel()

    async def _replace(self) -> views.HandedOver:
        """Have a new process serve the node, and end."""
        return await asyncio.shield(asyncio.ensure_future(self._hand_to_successor()))  # who asked may be gone by then

    async def _hand_to_successor(self) -> views.HandedOver:
        who = await successor.replace(self._serving, self._notifier)
        asyncio.get_running_loop().call_later(_REPLY, self._scope.cancel)
        return views.HandedOver(who)

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Run until cancelled; `on_ready` is called before the first registration."""
        await self._keeper.restore()  # before anything is seen: what was drained or latched is not Healthy for a moment
        if (read := self.node.health.handled.get("kmsg")) is not None:
            self._discovery.kmsg.after = read.boot, read.sequence
        async with anyio.create_task_group() as self._tasks:
            self.node.tasks = self._tasks
            self._discovery.start(self._tasks)
            self._tasks.start_soon(self._keep, self._kubelet_watch.part, self._serving.watch, self._kubelet_watch)
            self._tasks.start_soon(self._keep, "watchdog", self.watchdog.run)
            self._tasks.start_soon(self._keep, "health", partial(self.node.run, self._discovery.until))
            self._tasks.start_soon(self._serving.predecessor.run)
            admin = partial(serve, self.control, self.config.agent.admin_socket, self.problems)
            self._tasks.start_soon(self._keep, "admin socket", admin)
            if self.config.http_listen is not None:
                self._tasks.start_soon(self._keep, "HTTP", partial(self._serve_http, self.config.http_listen))
            await self._settle()
            log.info("ready", resources=self.inventory.names())
            self._notifier.ready(f"waiting for {self._serving.kubelet.socket}")
            on_ready()
            self._tasks.start_soon(self._keep, "kubelet", self._serving.run)
            self._tasks.start_soon(self._keep, "list warnings", self._list_warnings.run)
            self._tasks.start_soon(self._keep, "reload", self._reloader.run)
            self._tasks.start_soon(self._keep, "configuration file", self._reloader.watch)

    async def _serve_http(self, listen: str) -> None:
        serving = await to_thread.run_sync(_load_http)
        faces = self.control, self.watchdog, self.counts, listen, self.config.http_hosts, self.problems
        try:
            await serving.serve(*faces)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not await self._serving.predecessor.lasts():
                raise
            await self._serving.predecessor.gone()  # who listens there
            await serving.serve(*faces)

    async def _settle(self) -> None:
        """Give the kubelet's memory and every backend's first scan their time."""
        with anyio.move_on_after(SETTLE):
            await self._pod_claims.ask()
            await self._discovery.looked()
            await self._discovery.caught_up()  # the first list tells what was logged before we came
        for kind, discoverer in self.discoverers.items():
            if not discoverer.first_scan.is_set():
                log.warning("backend-slow", backend=kind, waited=SETTLE, then="listing what is known so far")
        self.node.ready(self.discoverers)
        at_most, awaits = self.config.agent.boot_wait, self._serving.wait_for
        await wait_for_held(self.node.ledger, self.inventory, self._serving.kubelet, at_most, awaits)
        self._list_warnings.tell_of_selectors(self.config.resources)

    # --- what happens to the node ---

    async def _record(self, given: Sequence[Held]) -> None:
        """An Allocate is about to give these."""
        await self.node.allocated(given)
        self._pod_claims.allocated()

    # --- another configuration ---

    async def reload(self) -> views.Reloaded:
        """Read the configuration again and apply what changed.

        Raises:
            RefusedError: it has mistakes, all of them in the sentence; nothing has changed.
        """
        return await asyncio.shield(self._reloader.request())

    async def _apply(self, change: Change) -> None:
        """Put another configuration into force."""
        await self._configuration_swap.apply(change, SETTLE)
        self._kubernetes.configure(self.config.kubernetes)
        self._cdi.changed(self.inventory.names())
        self._prepare_what_is_new()

    def _prepare_what_is_new(self) -> None:
        self._tasks.start_soon(self._adopt_what_is_new)

    async def _adopt_what_is_new(self) -> None:
        """Once everybody has looked: until then, nobody knows what is another's."""
        await self._discovery.looked()
        self._adopter.configure(self.inventory.selection.in_force(), self.inventory.slots)

    def _slots(self) -> dict[str, dict[str, Slot]]:
        return {name: dict(self.inventory.slots(name)) for name in self.inventory.names()}

    # --- what an operator sees and decides ---

    def _configuration(self) -> views.Configuration:
        config, reloader = self.config, self._reloader
        return views.Configuration(str(config.source or ""), config.read_at, reloader.mistakes, reloader.needs_restart)

    # --- claims ---

    async def _prepare_hardware(self) -> None:
        await self._adopt_what_is_new()
        await self._resumer.resume()

    async def _look_at(self, kind: str, units: Set[str]) -> None:
        while (discoverer := self.discoverers.get(kind)) is not None:  # else it is not configured, and sees nothing
            await discoverer.look_at(units)
            if self.discoverers.get(kind) is discoverer:
                return  # else a reload has put another into its place, which is to look

    async def _mind_claims(self) -> None:
        """What only the one agent of a node may do: keep the state, end claims and undo them, act before any pod asks."""
        await self._keeper.begin()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._keep, "claims", self._pod_claims.run)
                tasks.start_soon(self._keep, "lost resources", self._serving.lost_resources.run)
                tasks.start_soon(self._keep, "hardware", self._reconciler.run)
                tasks.start_soon(self._keep, "history", partial(self._history.run, self._keeper.write_history))
                tasks.start_soon(self._keep, "Kubernetes", self._kubernetes.run)
                tasks.start_soon(self._keep, "CDI", self._cdi.run)
                tasks.start_soon(self._prepare_hardware)
                if self._features is not None:
                    tasks.start_soon(self._keep, "features", self._features.run)
        finally:
            await self._keeper.end()
            self._jobs.close()

    async def _catch_up(self) -> None:
        """Learn what the agent before us gave, and was told, while we waited for it to go."""
        await self.node.restore()
        with anyio.move_on_after(SETTLE):
            await self._pod_claims.ask()


def _load_http() -> ModuleType:
    """4 MB that most nodes can do without, and 60 ms that the event loop can."""
    from agent.console.http import serving  # noqa: PLC0415

    return serving
