"""A kubelet to try device plugins on; it behaves as the kubelet contract says a real one does.

What outlives its process (pods, the node's status, the files on disk) belongs to `Kubelet`; everything else
is made again at each start, so that a restart forgets what a real one forgets.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio

from agent.kubelet.api.v1 import ListPodResourcesResponse
from agent.simulation import checkpoint
from agent.simulation.clock import Background, Clock
from agent.simulation.device_manager import DeviceManager
from agent.simulation.dra import Drivers, keep_slices
from agent.simulation.model import Change, Feed, Kind, Phase, Pod, PodStatus, ResourceView, Version
from agent.simulation.pod_workers import KubeletStoppedError, Lister, Pods, PodWorkers
from agent.simulation.registration import Clients, Gate, Handler, KubeletSocket, Registration, at_once, open_gate, wipe

DISCONNECT_DELAY: Final = 0.0005  # seconds from a stream's end until its connection is closed (contract: A2)


async def unhindered() -> None:
    """Read a list at once."""


class _Process:
    """One kubelet process: from a start to the next stop."""

    def __init__(self, kubelet: Kubelet) -> None:
        k = kubelet
        self._background = Background()
        self.manager = DeviceManager(k.plugin_dir, k._node, k._feed, k._clock, k._rng, k.version)
        self.clients = Clients(
            self.manager, self._background, k._clock, k._disconnect_delay, k.version, k.handler, k.before_list
        )
        self.pods = PodWorkers(k._pods, self.manager, self._background, k._feed, k._clock, k._rng, k._pod_delay)
        registration = Registration(k.plugin_dir, self.clients, self._background, k._feed, k.version, k.gate)
        self._registration = KubeletSocket([registration], k.socket, k.before_listening)
        self.drivers = Drivers(k.root, self._background, k._clock, k.wipe_slices) if k.serves_dra else None
        lister = Lister(self._resources, self.manager.views, k._clock)
        self._pod_resources = KubeletSocket([lister], k.pod_resources_socket)

    async def open(self) -> None:
        """Checkpoint, then kubelet.sock, then the pod resources socket (kubelet contract: A6)."""
        self.manager.load()
        await self._registration.open()
        await self._pod_resources.open()
        self.pods.resume()
        if self.drivers is not None:
            self.drivers.start()

    def _resources(self) -> ListPodResourcesResponse:
        listed = self.pods.resources()
        if self.drivers is not None:
            listed.pod_resources.extend(self.drivers.resources())
        return listed

    async def stand_still(self) -> None:
        """Serve nothing more and act on nothing, with every connection to a plugin open."""
        self.pods.stop()
        self.clients.stand_still()
        await self._registration.shut_down(patience=0.0)
        await self._pod_resources.shut_down(patience=0.0)
        await self.manager.stop()

    async def close(self, *, kill: bool) -> None:
        """End every part, whatever state it is in."""
        self.pods.stop()
        if kill:
            self._registration.reset_connections()
            self._pod_resources.reset_connections()
        await self._registration.shut_down(patience=0.0)
        await self._pod_resources.shut_down(patience=0.0)
        self.clients.stop(kill=kill)
        await self.manager.stop()
        await self._background.stop()
        if self.drivers is not None:
            self.drivers.close()


class Kubelet:
    """A node with its kubelet, in the directory `root`.

    Args:
        root: the kubelet's root; `pod-resources/kubelet.sock` lies below it.
        plugin_dir: where `kubelet.sock` and the checkpoint lie; `<root>/device-plugins` if not given.
        version: which kubelet it behaves as, where they differ.
        handler: what one of 1.37 does with a Register at a path that has a client.
        clock: runs its long delays.
        rng: makes its random choices.
        disconnect_delay: seconds from a stream's end until the kubelet deals with it (A2).
        pod_delay: seconds of `clock` that each pod takes to become known after a restart (A5).
        before_listening: awaited between `kubelet.sock` appearing and listening (A6).
        serves_dra: whether it looks for DRA drivers.

    `gate`, `before_listening` and `before_list`, which is awaited before each list is looked at and the next one read, may be
    exchanged at any time; the next start has them.
    """

    def __init__(
        self,
        root: Path,
        *,
        plugin_dir: Path | None = None,
        version: Version = "1.36",
        handler: Handler = "all",
        clock: Clock | None = None,
        rng: random.Random | None = None,
        disconnect_delay: float = DISCONNECT_DELAY,
        pod_delay: float = 0.0,
        before_listening: Callable[[], Awaitable[None]] = at_once,
        serves_dra: bool = False,
    ) -> None:
        self.root = root
        self.serves_dra = serves_dra
        self.wipe_slices: Callable[[str | None], Awaitable[None]] = keep_slices
        """Deletes the node's ResourceSlices, of one driver or of all; the next start has it."""
        self.plugin_dir = plugin_dir or root / "device-plugins"
        self.socket = self.plugin_dir / "kubelet.sock"
        self.pod_resources_socket = root / "pod-resources" / "kubelet.sock"
        self.registrations: Counter[str] = Counter()
        self.panics: list[str] = []
        self.version: Version = version
        """Which kubelet the next start makes."""
        self.handler: Handler = handler
        self._clock = clock or Clock()
        self._rng = rng or random.Random(0)  # noqa: S311  # repeatable choices, no secrets
        self._disconnect_delay = disconnect_delay
        self._pod_delay = pod_delay
        self.before_listening = before_listening
        self.before_list: Callable[[], Awaitable[None]] = unhindered
        self.gate: Gate = open_gate
        self._feed = Feed()
        self._feed.subscribe(self._count)
        self._node: dict[str, ResourceView] = {}
        self._pods: Pods = {}
        self._process: _Process | None = None
        self._standing: list[_Process] = []

    # --- start and stop ---

    async def start(self, wipe_as: Version | None = None) -> None:
        """Start as a real one does: delete old sockets, create `kubelet.sock`, serve pod resources.

        Raises:
            OSError: a socket cannot be made.
            RuntimeError: it runs already.
        """
        if self._process is not None:
            raise RuntimeError("the kubelet runs already; stop it first")
        self.plugin_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        self.pod_resources_socket.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        wipe(self.plugin_dir, wipe_as or self.version)
        self._process = _Process(self)
        try:
            await self._process.open()
        except BaseException:
            await self.stop(kill=True)
            raise
        self._feed.publish(Change(Kind.STARTED))

    async def stop(self, *, kill: bool = False) -> None:
        """End the process; its sockets stay behind (A6). `kill` breaks connections instead of closing them."""
        process, self._process = self._process, None
        for one in (*self._standing, *((process,) if process else ())):
            await one.close(kill=kill)
        self._standing.clear()
        if process is not None:
            self._feed.publish(Change(Kind.STOPPED))

    async def stand_still(self) -> None:
        """The process hangs and cannot be killed: its connections stay open, and another one can be started."""
        process, self._process = self._running(), None
        await process.stand_still()
        self._standing.append(process)
        self._feed.publish(Change(Kind.STOPPED))

    async def restart(self, wipe: Version | None = None, *, kill: bool = False) -> None:
        """Stop and start; `wipe` says which version's way of removing sockets to use this time."""
        await self.stop(kill=kill)
        await self.start(wipe)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- what an observer sees ---

    @property
    def resources(self) -> Mapping[str, ResourceView]:
        """The resources as the node's status reports them; none is ever removed from it."""
        return dict(self._node)

    @property
    def pods(self) -> Mapping[tuple[str, str], PodStatus]:
        """Every pod ever admitted: (namespace, name) → status."""
        return dict(self._pods)

    def streams(self, resource: str) -> int:
        """How many ListAndWatch streams of this resource are open."""
        return self._process.clients.streams[resource] if self._process is not None else 0

    def held(self, pod: Pod, container: str) -> dict[str, frozenset[str]]:
        """What the device manager believes this container holds: resource → IDs."""
        devices = self._running().manager.held.of(self._pods[pod.key].uid, container)
        return {resource: allocation.ids for resource, allocation in devices.items()}

    def shared(self, container: str) -> dict[tuple[str, str], int]:
        """(Resource, ID) that this container of several active pods holds → of how many."""
        active = [it.pod for it in self._pods.values() if it.active]
        held = (self.held(pod, container).items() for pod in active)
        users = Counter((resource, device) for each in held for resource, ids in each for device in ids)
        return {slot: number for slot, number in users.items() if number > 1}

    @property
    def drivers(self) -> Drivers:
        """The DRA drivers of the process that runs, and the claims of its pods."""
        found = self._running().drivers
        assert found is not None, "it does not serve DRA"
        return found

    def subscribe(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        """Call `listener` with every change, at once; what is returned ends that."""
        return self._feed.subscribe(listener)

    def changes(self) -> AbstractContextManager[asyncio.Queue[Change]]:
        """Every change from now on, in a queue."""
        return self._feed.queue()

    async def wait_for(self, predicate: Callable[[Kubelet], bool], timeout: float = 120.0) -> None:  # noqa: ASYNC109
        """Wait until the predicate holds; it is asked again after each change.

        Raises:
            TimeoutError: it did not within `timeout` real seconds.
        """
        if predicate(self):
            return
        reached = asyncio.Event()
        unsubscribe = self.subscribe(lambda _: reached.set() if predicate(self) else None)
        try:
            with anyio.fail_after(timeout):
                await reached.wait()
        except TimeoutError:
            raise TimeoutError(f"not reached within {timeout} s; the node shows {self._summary()}") from None
        finally:
            unsubscribe()

    def _summary(self) -> str:
        views = [f"{v.name} {v.allocatable}/{v.capacity} ({self.streams(v.name)} streams)" for v in self._node.values()]
        return ", ".join(views) or "no resources"

    def _count(self, change: Change) -> None:
        if change.kind is Kind.REGISTERED:
            self.registrations[change.resource] += 1
        elif change.kind is Kind.PANIC:
            self.panics.append(change.text)

    # --- its faults ---

    def overlook(self, pod: Pod) -> None:
        """Count what this pod has as free, as after a List during its Allocate (kubelet contract: A11.8)."""
        self._running().manager.held.overlooked.add(self._pods[pod.key].uid)

    def lose_checkpoint(self, *, emptied: bool = False) -> None:
        """The checkpoint is removed or emptied; the next start knows of no device that pods have (A11.1)."""
        path = self.plugin_dir / checkpoint.NAME
        if emptied:
            checkpoint.write(self.plugin_dir, checkpoint.encode({}, {}))
        else:
            path.unlink()

    # --- pods ---

    async def admit(self, pod: Pod) -> PodStatus:
        """Admit a pod: allocate its devices and start its containers.

        Raises:
            KubeletStoppedError: no kubelet runs, or it ended meanwhile.
            KubeletPanicError: a device vanished while its Allocate was in flight (A7.1).
            ValueError: a pod of this name is running.
        """
        return await self._running().pods.admit(pod)

    def end(self, pod: Pod) -> None:
        """The pod has come to its end; its devices are freed at the next look (A4: no Deallocate)."""
        self._pods[pod.key].phase = Phase.SUCCEEDED
        self._feed.publish(Change(Kind.POD, text=f"{pod.namespace}/{pod.name} {Phase.SUCCEEDED}"))

    async def restart_container(self, pod: Pod, name: str) -> None:
        """A container has crashed and is started again."""
        container = next(c for c in pod.every() if c.name == name)
        await self._running().pods.restart_container(self._pods[pod.key], container)

    async def finish_init(self, pod: Pod) -> None:
        """The pod's long init container ends; the next one starts."""
        await self._running().pods.finish_init(self._pods[pod.key])

    def _running(self) -> _Process:
        if self._process is None:
            raise KubeletStoppedError("no kubelet is running; start it first")
        return self._process
