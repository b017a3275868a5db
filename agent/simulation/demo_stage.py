"""The demo's stage: a simulated kubelet, acts that change hardware, and what each change took from cause to list."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread
from msgspec import Struct

from agent.discovery.sources.inotify import CREATE, DELETE, MOVED_TO, Inotify
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
    """Of that, until the kernel told of the change."""
    waited_ms: float
    """Of the rest, for how long our threads could run and had no CPU; 0 where the kernel does not count it."""

    @property
    def fairlead_ms(self) -> float:
        """What is left, which is ours."""
        return round(max(self.latency_ms - self.kernel_ms - self.waited_ms, 0.0), 2)


class _Moment(NamedTuple):
    at: float
    """`time.perf_counter()`."""
    waited: float
    """Seconds for which threads of this process could run and had no CPU, until then."""


class Stage:
    """Lets things happen to the hardware and measures how long the kubelet took to learn of them."""

    def __init__(self, kubelet: Kubelet, directories: Collection[Path]) -> None:
        """Listen from now on; `directories` are where the kernel tells of the acts' effects."""
        self.kubelet = kubelet
        self.outcomes: list[Outcome] = []
        self._inotify = Inotify()
        for directory in directories:
            self._inotify.add_watch(str(directory), CREATE | DELETE | MOVED_TO)
        self._entry = ""
        self._told: dict[str, _Moment] = {}
        threading.Thread(target=self._listen, name="kernel", daemon=True).start()

    def _listen(self) -> None:
        """Note when the kernel told first of what an act does.

        In a thread of its own: on the loop, what the agent and the kubelet do there would count as the kernel's.
        """
        while True:
            select.select([self._inotify], (), ())
            now = time.perf_counter()
            if self._entry in {name for _, _, name in self._inotify.read()[0]} - self._told.keys():
                self._told[self._entry] = _Moment(now, _waited())

    async def act(self, resource: str, device: str, entry: str, effect: Callable[[], None]) -> Outcome | None:
        """Run a blocking effect on the directory entry `entry`; how `device` of `resource` changed with it.

        None if nothing reached the kubelet in time.
        """
        seen: list[tuple[Change, _Moment]] = []

        def note(change: Change) -> None:
            if change.kind is Kind.LIST and change.resource == resource and device in change.devices():
                seen.append((change, _Moment(change.at, _waited())))

        unsubscribe = self.kubelet.subscribe(note)
        began = _Moment(time.perf_counter(), _waited())
        self._entry, self._told = entry, {}
        try:
            await anyio.to_thread.run_sync(effect)
            await self.kubelet.wait_for(lambda _: bool(seen), _PATIENCE)
        except TimeoutError:
            return None
        finally:
            unsubscribe()
        outcome = _outcome(*seen[0], device, began, self._told.get(entry, began))
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


def _outcome(change: Change, came: _Moment, device: str, began: _Moment, told: _Moment) -> Outcome:
    kernel = max(min(told.at, came.at) - began.at, 0.0)
    waited = min(max(came.waited - told.waited, 0.0), came.at - began.at - kernel)
    return Outcome(
        change.resource,
        device,
        change.devices()[device],
        latency_ms=round((came.at - began.at) * 1000, 2),
        kernel_ms=round(kernel * 1000, 2),
        waited_ms=round(waited * 1000, 2),
    )


def _waited() -> float:
    """Seconds for which threads of this process could run and had no CPU (Linux: Documentation/scheduler/sched-stats.rst)."""
    total = 0
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError, IndexError):  # it has ended, or this kernel does not count (CONFIG_SCHED_INFO)
            total += int((thread / "schedstat").read_text().split()[1])
    return total / 1e9


def view(resources: Mapping[str, ResourceView]) -> list[tuple[str, int, int]]:
    """Name, capacity and allocatable of each resource, by name."""
    return [(name, found.capacity, found.allocatable) for name, found in sorted(resources.items())]
