"""The kubelet's pod resources API, v1: which container holds which devices, and which could be given out.

Kubelet contract: A5.
"""

from __future__ import annotations

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
from agent.simulation.changes import ResourceView
from agent.simulation.clock import Clock
from agent.simulation.device_manager.allocation import PodDevices
from agent.simulation.pods import PodStatus

QPS: Final = 100.0  # calls a second (kubelet contract: A5)
BURST: Final = 10.0  # calls at once: DefaultPodResourcesBurstTokens in the kubelet's sources


class Limiter:
    """A token bucket."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tokens = BURST
        self._filled = clock.now()

    def allow(self) -> bool:
        """May one more call pass?"""
        now = self._clock.now()
        self._tokens = min(BURST, self._tokens + (now - self._filled) * QPS)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def answer(pods: Iterable[PodStatus], held: PodDevices) -> ListPodResourcesResponse:
    """What List says of these pods: one entry for each ID, vanished ones too; no ordinary init containers."""
    return ListPodResourcesResponse(
        [
            PodResources(
                status.pod.name,
                status.pod.namespace,
                [
                    ContainerResources(
                        container.name,
                        [
                            ContainerDevices(resource, [device])
                            for resource, allocation in held.of(status.uid, container.name).items()
                            for device in sorted(allocation.ids)
                        ],
                    )
                    for container in status.pod.every()
                    if not status.in_init(container.name)
                ],
            )
            for status in pods
        ]
    )


class Lister(PodResourcesListerBase):
    """Serves List and GetAllocatableResources."""

    def __init__(
        self,
        snapshot: Callable[[], ListPodResourcesResponse],
        views: Callable[[], Iterable[ResourceView]],
        clock: Clock,
    ) -> None:
        self._snapshot, self._views = snapshot, views
        self._limiter = Limiter(clock)

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
        if not self._limiter.allow():
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
