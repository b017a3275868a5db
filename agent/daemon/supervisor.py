"""Wires the daemon's parts together around the node (`node.py`): who knows whom, what starts after what, what a start waits for.

Start: configuration → discovery and claims (`SETTLE` at most) → READY → directory, lock, sockets, registration.
Stop: streams end normally, sockets go; threads that hang hold nothing up. One supervised task for each part.
"""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import anyio
import structlog
from anyio import to_thread
from anyio.abc import TaskGroup

from agent.claims.ledger import names_of
from agent.config import Config
from agent.console.service import answer_probes, serve
from agent.console.sockets import node_name
from agent.daemon.control import AgentControl, Parts
from agent.daemon.dra import Dra
from agent.daemon.event_log import Events
from agent.daemon.list_reporter import ListReporter, ListWarnings
from agent.daemon.nfd_file import FeatureFile
from agent.daemon.node import Node
from agent.daemon.reload import ConfigurationSwap, Reloader
from agent.daemon.serving import PluginFactory, Serving, SoleAgent
from agent.daemon.shutdown import Shutdown
from agent.discovery.runner import DiscoveryRunner
from agent.hardware.adoption import Adopter
from agent.hardware.jobs import Jobs
from agent.health.book import DRAINED
from agent.kubelet import witnesses
from agent.kubelet.allocation import Allocator, Preferences, Starter
from agent.kubelet.client import listens
from agent.kubelet.kubelet_socket import Kubelet
from agent.kubelet.rivals import LostResources
from agent.kubernetes.runner import KubernetesParts
from agent.model import SlotKey
from agent.placement.choice import Admission
from agent.runtime import process
from agent.runtime.counts import Counts
from agent.runtime.pacing import SYSTEM, Clock
from agent.runtime.problems import Problems, Trouble
from agent.runtime.watchdog import Notifier, Watchdog, supervise
from backends.base import Backend

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
        clock: Clock = SYSTEM,
    ) -> None:
        """Prepare.

        Args:
            config: what is configured.
            backends: an instance for every kind that the config names.
            notifier: is told how the service is doing.
            events: what the log tells.
            clock: the time.
        """
        settings = config.agent
        backends = dict(backends)  # those in force, always: a reload exchanges them in place
        self._notifier = notifier
        self.problems = problems = Problems(clock.now)
        """What the daemon's parts report."""
        self._keep = partial(supervise, problems=problems)
        self.counts = counts = Counts()
        self.watchdog = Watchdog(notifier, problems=problems, lateness=counts.lateness.observe)
        self._kubelet_watch = self.watchdog.pulse("kubelet's directory")

        self.node = node = Node(config, backends, problems, clock)
        self.inventory, self.discoverers, pod_claims = node.inventory, node.discoverers, node.pod_claims
        self._discovery = DiscoveryRunner(settings, config.host, backends, node, self.watchdog, counts, problems)
        self._jobs = Jobs(node.turns, node.look_at)
        adopter = Adopter(backends, node.inventory, node.reconciler, node)

        # what the kubelet is told
        record = partial(witnesses.checkpoint_version, settings.plugin_dir)
        admission = Admission(record, clock.now)
        lost_resources = LostResources(settings.pod_resources, settings.plugin_dir, pod_claims=pod_claims)
        holder = pod_claims.holder
        allocator = Allocator(
            node.inventory,
            backends,
            self._jobs,
            node.allocated,
            cdi=node.cdi,
            admission=admission,
            holder=holder,
            being_given=pod_claims.being_given,
        )
        starter = Starter(node.inventory, node.ledger, backends, self._jobs, node, pod_claims.two_pods)
        dra = Dra(config, node_name(), node, backends, allocator, starter, problems, counts, clock)
        preferences = Preferences(node.inventory, backends, admission)
        factory = PluginFactory(allocator, preferences, starter, lost_resources, counts, record)
        kubernetes = KubernetesParts(config.kubernetes, node_name(), node, node.shortfall, problems, clock)
        path = settings.nfd_features.path
        features = None if path is None else FeatureFile(path, node.inventory.all_slots, problems=problems)
        sole_agent = SoleAgent(
            node, lost_resources, node.reconciler, adopter, self._jobs, kubernetes, dra, features, problems
        )
        self._serving = Serving(
            settings.plugin_dir, node, notifier, factory, sole_agent, counts, lost_resources, self._kubelet_watch.beat, problems,
            shares_http=config.http.is_on and not config.http.listen.startswith("unix:"),
        )  # fmt: skip

        # what the other parts are told, and ask for
        self._list_warnings = ListWarnings(node, kubernetes)
        self._reporter = ListReporter(
            node, self._serving, adopter, self._list_warnings, features, counts, kubernetes, dra
        )
        self._adopter = adopter
        self._swap = ConfigurationSwap(
            config, self._discovery, self._serving, adopter, self._list_warnings, kubernetes, dra, self._jobs, node
        )
        self._reloader = Reloader(self._swap, notifier, self._serving, problems)
        self._shutdown = Shutdown(self._serving, notifier)
        known = events or Events()
        parts = Parts(
            node, dra, backends, adopter, self._serving, known, problems, self._swap, self._reloader, self._shutdown
        )
        self.control = AgentControl(parts, clock=clock)
        """What the faces ask."""

    @property
    def config(self) -> Config:
        """What is in force."""
        return self._swap.config

    async def run_until_signal(self) -> None:
        """Run until SIGTERM or SIGINT."""
        process.settle()  # what has been imported: the collector skips it while thousands of devices are found
        log.info("starting", file=str(self.config.source or "none; KubeVirt's devices"))
        with self._shutdown.waited_for():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reloader.request)
            await self.run(process.settle)
        log.info("stopped")

    async def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Run until cancelled; `on_ready` is called before the first registration."""
        # before anything is seen: what was drained or latched is not Healthy for a moment
        await self.node.keeper.restore()
        read = self.node.health.handled.get("kmsg")
        async with anyio.create_task_group() as tasks:
            self._discovery.start(tasks, None if read is None else (read.boot, read.sequence))
            tasks.start_soon(self._keep, self._kubelet_watch.part, self._serving.watch, self._kubelet_watch)
            tasks.start_soon(self._keep, "watchdog", self.watchdog.run)
            tasks.start_soon(self._keep, "health", partial(self.node.run, self._discovery.until))
            tasks.start_soon(self._keep, "state", self.node.keeper.run)
            tasks.start_soon(self._keep, "lists", self._reporter.run)
            tasks.start_soon(self._keep, "adoption", self._adopter.run)
            tasks.start_soon(self._serving.predecessor.run)
            admin = partial(serve, self.control, self.config.agent.admin_socket, self.problems)
            tasks.start_soon(self._keep, "admin socket", admin)
            probes = partial(answer_probes, self.control, self.watchdog, self.config.agent.admin_socket)
            tasks.start_soon(self._keep, "probes", probes)
            if self.config.http.is_on:
                tasks.start_soon(self._keep, "HTTP", self._serve_http)
            await self._settle(tasks)
            log.info("ready", resources=self.inventory.names())
            self._notifier.ready(f"waiting for {self._serving.kubelet.socket}")
            on_ready()
            tasks.start_soon(self._keep, "kubelet", self._serving.run)
            tasks.start_soon(self._keep, "list warnings", self._list_warnings.run)
            tasks.start_soon(self._keep, "reload", self._reloader.run)
            tasks.start_soon(self._keep, "configuration file", self._reloader.watch)

    async def _serve_http(self) -> None:
        serving = await to_thread.run_sync(_load_http)
        faces = self.control, self.watchdog, self.counts, self.config.http.listen, self.config.http.hosts, self.problems
        listeners, predecessor = self._serving.standbys.listeners, self._serving.predecessor
        try:
            await serving.serve(*faces, listeners, predecessor.listeners())
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not await predecessor.lasts():
                raise
            await predecessor.gone()  # who listens there
            await serving.serve(*faces, listeners, predecessor.listeners())

    async def _settle(self, tasks: TaskGroup) -> None:
        """Wait for what is to be known before the first list, as long as it is worth."""
        await self._discovery.settle(self.node.pod_claims.ask)
        if self.node.looking() and await self._serving.predecessor.lasts():
            with anyio.move_on_after(HELD_BACK):  # the agent before us serves meanwhile
                await self.node.looked()
        slow = self.node.looking()
        self.node.ready(self.discoverers.keys() - slow)
        for kind in slow:
            told = self.problems.trouble(
                "first look", f"the first look at the hardware of {kind} has not ended", "first-look-lasts",
                "first-look-ended", backend=kind,
            )  # fmt: skip
            tasks.start_soon(list_when_found, kind, self.node, self._serving.kubelet, told)
        at_most = self.config.agent.boot_wait
        await wait_for_held(self.node, self._serving.kubelet.socket, at_most, self._serving.wait_for)
        self._list_warnings.tell_of_selectors(self.config.resources)


def _load_http() -> ModuleType:
    """4 MB that most nodes can do without, and 60 ms that the event loop can."""
    from agent.console.http import serving  # noqa: PLC0415

    return serving


# --- at a start: devices that were there before ---
#
# A kubelet rejects for good a pod whose devices it is not offered. After a boot it admits what it finds in its checkpoint a
# second after its start (docs/operations.md, "A reboot"), and a driver may take longer to make its devices. systemd starts
# the kubelet once this service is ready.


HELD_BACK: Final = 30.0
"""Seconds at most that first lists wait for a backend which is slow to look: 10,000 nodes take a busy machine some 10."""

_GLANCE: Final = 0.25
"""Seconds between two looks at what it has found; a kubelet that starts admits pods after a second."""

_BOOT_STEP: Final = 0.1  # seconds between two looks; no other part waits for it


async def wait_for_held(node: Node, kubelet: Path, at_most: float, tell: Callable[[str], None]) -> None:
    """Wait until every device that a pod had is there and Healthy, or one listens at the socket `kubelet`; `tell` is told for what."""
    awaited = _absent(node)
    if not awaited or listens(kubelet):
        return
    log.info("boot-waits", slots=names_of(awaited), then=f"the kubelet waits for this service, {at_most:g} s at most")
    with anyio.move_on_after(at_most):
        while awaited and not listens(kubelet):
            tell(f"devices that pods had before the boot: {', '.join(names_of(awaited))}")
            await anyio.sleep(_BOOT_STEP)
            awaited = _absent(node)
    tell("")
    if awaited:
        log.warning("boot-goes-on", slots=names_of(awaited), reason="these are not there, or not Healthy")
    else:
        log.info("boot-goes-on")


async def list_when_found(kind: str, node: Node, kubelet: Kubelet, told: Trouble) -> None:
    """Hold the first lists of a backend that is slow back, until it has found what an earlier run offered, or has looked at all.

    A kubelet that runs has admitted its pods, which lose nothing; of a short list it refuses new ones that the scheduler has
    counted on. One that starts meanwhile admits its pods again, and loses for good those whose device it has not heard of: it
    gets what there is. So does each after `HELD_BACK` seconds.
    """
    generation = kubelet.generation
    if listens(kubelet.socket):
        with anyio.move_on_after(HELD_BACK):
            while kubelet.generation == generation and kind in node.looking() and node.shortfall.awaits(kind):
                told.report_once("its first lists wait for devices that were offered before")
                await anyio.sleep(_GLANCE)
    node.ready([kind])
    while kind in node.looking():
        told.report_once("its lists have what it has found so far")
        await anyio.sleep(_GLANCE)
    told.healed()


def _absent(node: Node) -> list[SlotKey]:
    """What pods had of resources in force, and could not have now; what an operator has drained comes back by his word alone."""
    names = set(node.inventory.selection.names())  # of one that retires nothing is Healthy ever again
    return [
        held.slot
        for held in node.ledger.held()
        if held.resource in names
        and ((slot := node.inventory.slot(*held.slot)) is None or not slot.health.offered)
        and (slot is None or slot.health.reason != DRAINED)
    ]
