"""The demo's stage: a simulated kubelet, acts that change hardware, and what each change took from cause to list."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio.to_thread
from msgspec import Struct

from agent.discovery.sources.paths import Change as PathEvent
from agent.discovery.sources.paths import DirectoryWatch
from agent.simulation.changes import Change, Kind, ResourceView
from agent.simulation.kubelet import Kubelet

_PATIENCE = 5.0  # seconds for a change to reach the kubelet


class Outcome(Struct, frozen=True):
    """One device's change as the kubelet saw it."""

    resource: str
    device: str
    health: str
    """`Healthy`, `Unhealthy` or `gone`."""
    latency_ms: float
    """From before the system call that caused it until the kubelet held the new list."""
    kernel_ms: float
    """Of that, until the kernel told of the change; the rest is ours."""


class _Cause(Struct):
    began: float
    told: float | None = None


class Stage:
    """Lets things happen to the hardware and measures how long the kubelet took to learn of them."""

    def __init__(self, kubelet: Kubelet, directories: frozenset[Path]) -> None:
        """Prepare; `directories` are where the kernel tells of the acts' effects."""
        self.kubelet = kubelet
        self.outcomes: list[Outcome] = []
        self._watch = DirectoryWatch(self._kernel_told, lambda: None)
        self._watch.watch(directories)
        self._cause: _Cause | None = None
        self._entry = ""

    async def run(self) -> None:
        """Listen to the kernel until cancelled."""
        await self._watch.run()

    def _kernel_told(self, path: Path, _event: PathEvent) -> None:
        if self._cause is not None and self._cause.told is None and path.name == self._entry:
            self._cause.told = time.perf_counter()

    async def act(self, resource: str, device: str, entry: str, effect: Callable[[], None]) -> Outcome | None:
        """Run a blocking effect on the directory entry `entry`; how `device` of `resource` changed with it.

        None if nothing reached the kubelet in time.
        """
        seen: list[Change] = []
        unsubscribe = self.kubelet.subscribe(lambda c: seen.append(c) if _concerns(c, resource, device) else None)
        self._entry, self._cause = entry, _Cause(time.perf_counter())
        cause = self._cause
        try:
            await anyio.to_thread.run_sync(effect)
            await self.kubelet.wait_for(lambda _: bool(seen), _PATIENCE)
        except TimeoutError:
            return None
        finally:
            unsubscribe()
            self._cause = None
        outcome = _outcome(seen[0], device, cause)
        self.outcomes.append(outcome)
        return outcome

    async def restart_kubelet(self) -> float:
        """Restart the kubelet; the milliseconds from its socket's creation until every resource is registered."""
        before = set(self.kubelet.resources)
        await self.kubelet.stop()
        started = time.perf_counter()
        await self.kubelet.start()
        await self.kubelet.wait_for(lambda k: all(k.streams(name) for name in before), _PATIENCE)
        return (time.perf_counter() - started) * 1000


def _concerns(change: Change, resource: str, device: str) -> bool:
    return change.kind is Kind.LIST and change.resource == resource and device in change.devices()


def _outcome(change: Change, device: str, cause: _Cause) -> Outcome:
    told = min(cause.told or cause.began, change.at)
    return Outcome(
        change.resource,
        device,
        change.devices()[device],
        latency_ms=round((change.at - cause.began) * 1000, 2),
        kernel_ms=round((told - cause.began) * 1000, 2),
    )


def view(resources: Mapping[str, ResourceView]) -> list[tuple[str, int, int]]:
    """Name, capacity and allocatable of each resource, by name."""
    return [(name, found.capacity, found.allocatable) for name, found in sorted(resources.items())]
