"""The pods of one kubelet process: admits them, starts their containers, and tells of them by the pod resources API, v1.

Kubelet contract: A4, A5.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Iterable
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.kubelet.api.v1 import (
    AllocatableResourcesRequest,
    ContainerDevices,
    ContainerResources,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
    PodResources,
    PodResourcesListerBase,
)
from agent.kubelet.wire import Encoded, encode_allocatable
from agent.simulation.clock import Background, Clock
from agent.simulation.device_manager import AdmissionError, DeviceManager
from agent.simulation.model import (
    Change,
    Container,
    ContainerStatus,
    Feed,
    Kind,
    Phase,
    Pod,
    PodStatus,
    ResourceView,
    State,
)
from agent.simulation.plugin_client import PluginError

_RETRY: Final = 10.0  # seconds between attempts to start a container: the pod workers' resync with back-off


class KubeletStoppedError(Exception):
    """No kubelet is running, or it ended meanwhile; a pod that was being admitted is admitted again later."""


Pods = dict[tuple[str, str], PodStatus]


class PodWorkers:
    """Admits pods one after the other, starts their containers, and knows which pods it has heard of."""

    def __init__(
        self,
        pods: Pods,
        manager: DeviceManager,
        background: Background,
        feed: Feed,
        clock: Clock,
        rng: random.Random,
        pod_delay: float,
    ) -> None:
        self._pods = pods
        self._manager = manager
        self._background = background
        self._feed = feed
        self._clock = clock
        self._rng = rng
        self._admitting = asyncio.Lock()
        self._alive = True
        self._known_from = self._arrivals(pod_delay)

    def _arrivals(self, pod_delay: float) -> dict[str, float]:
        """When the pods that ran before this process become known to it: one after another (A5)."""
        now = self._clock.now()
        return {status.uid: now + pod_delay * n for n, status in enumerate(self._active(), start=1)}

    def _active(self) -> list[PodStatus]:
        return [status for status in self._pods.values() if status.active]

    def resume(self) -> None:
        """Go on with pods that a former process has admitted and left half started; of no other it knows."""
        for status in self._active():
            if status.phase is Phase.PENDING and status.admitted:
                self._background.spawn(self._advance(status))

    def stop(self) -> None:
        """The process ends; containers go on running."""
        self._alive = False

    # --- what the kubelet knows ---

    def _known(self) -> list[PodStatus]:
        now = self._clock.now()
        return [status for status in self._active() if self._known_from.get(status.uid, now) <= now]

    def _collect_garbage(self) -> None:
        """Free what ended pods held; not before every pod has been heard of, and without a new checkpoint."""
        active, known = self._active(), self._known()
        if len(active) == len(known):
            self._manager.held.keep_only({status.uid for status in active})

    def resources(self) -> ListPodResourcesResponse:
        """What the pod resources API answers now (A5)."""
        self._collect_garbage()
        return ListPodResourcesResponse([self._listed(status) for status in self._known()])

    def _listed(self, status: PodStatus) -> PodResources:
        """One entry for each ID, vanished ones too; no ordinary init containers."""
        containers = [
            ContainerResources(
                container.name,
                [
                    ContainerDevices(resource, [device])
                    for resource, allocation in self._manager.held.of(status.uid, container.name).items()
                    for device in sorted(allocation.ids)
                ],
            )
            for container in status.pod.every()
            if not status.in_init(container.name)
        ]
        return PodResources(status.pod.name, status.pod.namespace, containers)

    # --- admission ---

    async def admit(self, pod: Pod) -> PodStatus:
        """Allocate for every container, one call each, then start them; a refusal is terminal.

        Raises:
            KubeletStoppedError: the kubelet ended meanwhile.
            KubeletPanicError: it crashed (A7.1).
            ValueError: a pod of this name is running.
        """
        if pod.key in self._pods and self._pods[pod.key].active:
            raise ValueError(f"pod {pod.namespace}/{pod.name} is running already")
        status = PodStatus(pod, str(uuid.UUID(int=self._rng.getrandbits(128), version=4)))
        status.containers = {container.name: ContainerStatus() for container in pod.every()}
        self._pods[pod.key] = status
        async with self._admitting:  # the kubelet's sync loop: a slow Allocate delays unrelated pods
            try:
                await self._allocate(status)
            except AdmissionError as error:
                self._check_alive(status)
                status.phase, status.reason = Phase.FAILED, "UnexpectedAdmissionError"
                status.message = f"Allocate failed due to {error}, which is unexpected"
                self._tell(status)
                return status
            except BaseException:
                del self._pods[pod.key]
                raise
        self._check_alive(status)
        status.admitted = True
        await self._advance(status)
        return status

    def _check_alive(self, status: PodStatus) -> None:
        if not self._alive:
            del self._pods[status.pod.key]
            raise KubeletStoppedError(f"the kubelet ended while it admitted {status.pod.name}; admit the pod again")

    async def _allocate(self, status: PodStatus) -> None:
        reusable: dict[str, set[str]] = {}
        for container in status.pod.every():
            if not container.resources:
                continue
            self._collect_garbage()
            given = await self._manager.allocate(status.uid, container, reusable)
            status.containers[container.name].given = given
            for resource, ids in given.items():
                left = reusable.setdefault(resource, set())
                left.update(ids) if status.in_init(container.name) else left.difference_update(ids)

    # --- containers ---

    async def _advance(self, status: PodStatus) -> None:
        """Start what is due: init containers one after another, then the others together."""
        for container in status.pod.init:
            state = status.containers[container.name]
            if state.state is State.WAITING and not await self._start(status, container):
                return
            if container.sidecar or state.state is State.TERMINATED:
                continue
            if container.long:
                return
            state.state = State.TERMINATED
        waiting = [c for c in status.pod.containers if status.containers[c.name].state is State.WAITING]
        started = [await self._start(status, container) for container in waiting]
        if all(started) and status.active:
            status.phase = Phase.RUNNING
            self._tell(status)

    async def _start(self, status: PodStatus, container: Container) -> bool:
        state = status.containers[container.name]
        try:
            await self._manager.pre_start(status.uid, container.name)
        except PluginError as error:
            state.state, state.reason, state.message = State.WAITING, "CreateContainerConfigError", str(error)
            self._tell(status)
            if self._alive:
                self._background.spawn(self._retry(status))
            return False
        state.state, state.reason, state.message = State.RUNNING, "", ""
        state.starts += 1
        return True

    async def _retry(self, status: PodStatus) -> None:
        await self._clock.sleep(_RETRY)
        if status.active:
            await self._advance(status)

    async def restart_container(self, status: PodStatus, container: Container) -> None:
        """A container has crashed and starts again; of its devices only PreStartContainer is asked (A4)."""
        status.containers[container.name].state = State.WAITING
        await self._start(status, container)
        self._tell(status)

    async def finish_init(self, status: PodStatus) -> None:
        """The long init container that runs now comes to its end."""
        for container in status.pod.init:
            if not container.sidecar and status.containers[container.name].state is State.RUNNING:
                status.containers[container.name].state = State.TERMINATED
        await self._advance(status)

    def _tell(self, status: PodStatus) -> None:
        problems = [f"{name}: {c.reason}: {c.message}" for name, c in status.containers.items() if c.reason]
        words = [f"{status.pod.namespace}/{status.pod.name} {status.phase}", status.reason, status.message, *problems]
        self._feed.publish(Change(Kind.POD, text=" · ".join(word for word in words if word)))


# --- the pod resources API ---

_QPS: Final = 100.0  # calls a second (kubelet contract: A5)
_BURST: Final = 10.0  # calls at once: DefaultPodResourcesBurstTokens in the kubelet's sources


class Lister(PodResourcesListerBase):
    """Serves List and GetAllocatableResources."""

    def __init__(
        self,
        snapshot: Callable[[], ListPodResourcesResponse],
        views: Callable[[], Iterable[ResourceView]],
        clock: Clock,
    ) -> None:
        self._snapshot, self._views = snapshot, views
        self._clock = clock
        self._calls, self._filled = _BURST, clock.now()

    async def list(self, _list_pod_resources_request: ListPodResourcesRequest) -> ListPodResourcesResponse:
        """The pods known now.

        Raises:
            GRPCError: more than a hundred calls a second.
        """
        self._limit()
        return self._snapshot()

    async def get_allocatable_resources(  # type: ignore[override]  # the codec takes what is encoded
        self, _allocatable_resources_request: AllocatableResourcesRequest
    ) -> Encoded:
        """What could be given now: one entry for each healthy device.

        Raises:
            GRPCError: as above.
        """
        self._limit()
        return encode_allocatable((view.name, sorted(view.healthy)) for view in self._views())

    def _limit(self) -> None:
        """Take a call out of the token bucket."""
        now = self._clock.now()
        self._calls = min(_BURST, self._calls + (now - self._filled) * _QPS)
        self._filled = now
        if self._calls < 1:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._calls -= 1
