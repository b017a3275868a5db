"""What is asked of the simulated kubelet, and what an observer sees of it.

Pods as a test or the demo asks for them, and what became of them; resources as in the node's status, and each change of them.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from msgspec import Struct, field

from agent.kubelet.wire import HEALTHY, UNHEALTHY

Version = Literal["1.32", "1.36", "1.37"]
"""Which kubelet: those between behave as the one before."""


# --- pods ---


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
    given: dict[str, frozenset[str]] = {}
    """Resource → the IDs that it was given at its admission, whatever a kubelet has forgotten of it since."""


class PodStatus(Struct):
    """What became of one pod; the reason and message are what its owner reads."""

    pod: Pod
    uid: str
    admitted: bool = False
    """Whether it has all that it asks for."""
    phase: Phase = Phase.PENDING
    reason: str = ""
    message: str = ""
    containers: dict[str, ContainerStatus] = {}

    @property
    def active(self) -> bool:
        """Whether it may still run."""
        return self.phase in (Phase.PENDING, Phase.RUNNING)

    def in_init(self, name: str) -> bool:
        """Whether this container is an ordinary init container, one that runs to its end."""
        return any(c.name == name and not c.sidecar for c in self.pod.init)


# --- resources, and changes ---

GONE = "gone"  # said of a device that left the list


class ResourceView(Struct, frozen=True):
    """One resource as the node's status reports it, with the IDs behind the numbers."""

    name: str
    capacity: int = 0
    allocatable: int = 0
    healthy: frozenset[str] = frozenset()
    unhealthy: frozenset[str] = frozenset()


class Kind(enum.StrEnum):
    """What has happened."""

    STARTED = "started"
    STOPPED = "stopped"
    REGISTERED = "registered"
    REFUSED = "refused"
    """A Register failed; the text is what the plugin was told."""
    STREAM_OPENED = "stream-opened"
    LIST = "list"
    STREAM_ENDED = "stream-ended"
    """The kubelet has seen the end of a stream, and has not acted on it yet."""
    DISCONNECTED = "disconnected"
    """The kubelet has closed its connection to the plugin; every device is unhealthy."""
    PROMOTED = "promoted"
    """The kubelet has closed its connection to a plugin, and another plugin of the resource is asked from now on (1.37)."""
    EXPIRED = "expired"
    """No plugin registered within the grace period."""
    CHECKPOINT = "checkpoint"
    POD = "pod"
    PANIC = "panic"
    """A real kubelet would have crashed here (kubelet contract: A7)."""


class Change(Struct, frozen=True):
    """One event; `before` and `after` are the resource's views around it, where it has any."""

    kind: Kind
    resource: str = ""
    text: str = ""
    before: ResourceView | None = None
    after: ResourceView | None = None
    at: float = field(default_factory=time.perf_counter)
    """`time.perf_counter()`; of a list, the moment its message had arrived, before it was read."""
    message: bytes = b""
    """A list as the plugin sent it."""

    def devices(self) -> dict[str, str]:
        """The devices whose state differs: ID → Healthy, Unhealthy or gone."""
        if self.after is None:
            return {}
        before = self.before or ResourceView(self.resource)
        changed = dict.fromkeys(sorted(self.after.healthy - before.healthy), HEALTHY)
        changed |= dict.fromkeys(sorted(self.after.unhealthy - before.unhealthy), UNHEALTHY)
        left = (before.healthy | before.unhealthy) - self.after.healthy - self.after.unhealthy
        return changed | dict.fromkeys(sorted(left), GONE)


class Feed:
    """Hands every change to all listeners, at once and in order."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[Change], None]] = []

    def publish(self, change: Change) -> None:
        """Hand on a change."""
        for listener in tuple(self._listeners):
            listener(change)

    def subscribe(self, listener: Callable[[Change], None]) -> Callable[[], None]:
        """Call `listener` with every change from now on; what is returned ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    @contextmanager
    def queue(self) -> Iterator[asyncio.Queue[Change]]:
        """Every change from now on, in a queue."""
        changes: asyncio.Queue[Change] = asyncio.Queue()
        unsubscribe = self.subscribe(changes.put_nowait)
        try:
            yield changes
        finally:
            unsubscribe()
