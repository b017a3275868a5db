"""What an observer of the simulated kubelet sees: resources as in the node's status, and each change of them."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec import Struct, field

from agent.kubelet.wire import HEALTHY, UNHEALTHY

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
