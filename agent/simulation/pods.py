"""Pods as a test or the demo asks for them, and what became of them."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping

from msgspec import Struct


class Container(Struct, frozen=True):
    """A container: resource → how many devices it asks for."""

    name: str
    resources: Mapping[str, int] = {}
    sidecar: bool = False
    """Of an init container: it goes on running (restartPolicy Always), so it keeps its devices."""
    long: bool = False
    """Of an init container: it runs until `Kubelet.finish_init`."""


class Pod(Struct, frozen=True):
    """A pod as its owner wrote it."""

    name: str
    containers: tuple[Container, ...]
    init: tuple[Container, ...] = ()
    namespace: str = "default"

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    def every(self) -> Iterator[Container]:
        """Its containers in the order in which the kubelet allocates and starts them."""
        yield from self.init
        yield from self.containers


class Phase(enum.StrEnum):
    """A pod's phase."""

    PENDING = "Pending"
    RUNNING = "Running"
    FAILED = "Failed"
    SUCCEEDED = "Succeeded"


class State(enum.StrEnum):
    """A container's state."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


class ContainerStatus(Struct):
    """What became of one container."""

    state: State = State.WAITING
    reason: str = ""
    message: str = ""
    starts: int = 0


class PodStatus(Struct):
    """What became of one pod; the reason and message are what its owner reads."""

    pod: Pod
    uid: str
    phase: Phase = Phase.PENDING
    reason: str = ""
    message: str = ""
    containers: dict[str, ContainerStatus] = {}

    @property
    def active(self) -> bool:
        """May it still run?"""
        return self.phase in (Phase.PENDING, Phase.RUNNING)

    def in_init(self, name: str) -> bool:
        """Is this container an ordinary init container, one that runs to its end?"""
        return any(c.name == name and not c.sidecar for c in self.pod.init)
