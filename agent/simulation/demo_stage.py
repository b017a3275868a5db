"""The demo's stage: hardware that comes and goes, a simulated kubelet, and what each change took from cause to list.

The hardware is real loop devices with real kernel events, and a stub's file.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import anyio
import anyio.to_thread
from msgspec import Struct

from agent.discovery.paths import CREATE, DELETE, MOVED_TO, Inotify
from agent.simulation.api_server import Objects
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import GONE, Change, Kind

_CONTROL: Final = Path("/dev/loop-control")
_LOOP_CTL_ADD: Final = 0x4C80  # linux/loop.h
_LOOP_CTL_REMOVE: Final = 0x4C81
_UDEV_READS: Final = 2.0  # seconds, at most, for which udevd has a new block device open
_TRY_AGAIN: Final = 0.005  # seconds
_NUMBERS: Final = range(100, 1000)  # far from those that losetup gives out


class LoopDevice(Struct, frozen=True):
    """One loop device of our own; adding takes the kernel half a millisecond, removing thirty."""

    number: int

    @classmethod
    def free(cls) -> LoopDevice | None:
        """A free one, if this process may make and remove it; two processes get different ones."""
        ours = os.getpid() % len(_NUMBERS)
        numbers = (*_NUMBERS[ours:], *_NUMBERS[:ours])
        device = cls(next((n for n in numbers if not Path(f"/dev/loop{n}").exists()), _NUMBERS[ours]))
        try:
            device.add()
            device.remove()
        except OSError:
            return None
        return device

    @property
    def name(self) -> str:
        """Its node's name in /dev."""
        return f"loop{self.number}"

    def add(self) -> None:
        """Make it; blocks until its node is there.

        Raises:
            OSError: not permitted, no such driver, or it exists.
        """
        self._control(_LOOP_CTL_ADD)

    def remove(self) -> None:
        """Remove it; blocks for some 30 ms, or until udevd has read it; one that is gone already is no error.

        Raises:
            OSError: not permitted, or it is in use.
        """
        deadline = time.monotonic() + _UDEV_READS
        while True:
            try:
                return self._control(_LOOP_CTL_REMOVE)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return None
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_TRY_AGAIN)

    def _control(self, request: int) -> None:
        fd = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, request, self.number)
        finally:
            os.close(fd)


def write_stub_file(path: Path, lines: str) -> None:
    """Replace a stub's file at once, so that no reader sees half of it."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(lines)
    fresh.rename(path)


# --- the stage ---

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

    def __init__(
        self, kubelet: Kubelet, directories: Collection[Path], objects: Objects, pools: Mapping[str, str]
    ) -> None:
        """Listen from now on.

        Args:
            kubelet: what is told of resources by their plugins.
            directories: where the kernel tells of the acts' effects.
            objects: what an API server has.
            pools: the resources of which that is told → their pools.
        """
        self.kubelet, self.objects, self._pools = kubelet, objects, pools
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

        None if nothing reached the kubelet, or the API server where that is told of the resource, in time.
        """
        seen: asyncio.Future[tuple[str, _Moment]] = asyncio.get_running_loop().create_future()
        pool = self._pools.get(resource)
        before = self.pool_health(pool).get(device, GONE) if pool else ""

        def note(change: Change) -> None:
            is_it = change.kind is Kind.LIST and change.resource == resource and device in change.devices()
            if is_it and not seen.done():
                seen.set_result((change.devices()[device], _Moment(change.at, _waited())))

        def note_slice() -> None:
            health = self.pool_health(pool).get(device, GONE) if pool else ""
            if health != before and not seen.done():
                seen.set_result((health, _Moment(time.perf_counter(), _waited())))

        unsubscribe = self.kubelet.subscribe(note), self.objects.subscribe(note_slice)
        began = _Moment(time.perf_counter(), _waited())
        self._entry, self._told = entry, {}
        try:
            await anyio.to_thread.run_sync(effect)
            with anyio.fail_after(_PATIENCE):
                health, came = await seen
        except TimeoutError:
            return None
        finally:
            for end in unsubscribe:
                end()
        outcome = _outcome(resource, health, came, device, began, self._told.get(entry, began))
        self.outcomes.append(outcome)
        return outcome

    def pool_health(self, pool: str) -> dict[str, str]:
        """The devices of a pool, each with what its taints say of it."""
        return {
            it["name"]: "Unhealthy" if any(one["effect"] != "None" for one in it.get("taints", ())) else "Healthy"
            for it in self.objects.pool(pool)
        }

    def view(self) -> list[tuple[str, int, int]]:
        """Name, capacity and allocatable of each resource, by name; in slices it is what is there and has no taint."""
        by_plugin = {name: (it.capacity, it.allocatable) for name, it in self.kubelet.resources.items()}
        healths = {name: list(self.pool_health(pool).values()) for name, pool in self._pools.items()}
        by_claim = {name: (len(of), of.count("Healthy")) for name, of in healths.items()}
        return [(name, *numbers) for name, numbers in sorted({**by_plugin, **by_claim}.items())]

    async def restart_kubelet(self) -> float:
        """Restart the kubelet; the milliseconds from its socket's creation until every resource is registered."""
        before = set(self.kubelet.resources)
        await self.kubelet.stop()
        started = time.perf_counter()
        await self.kubelet.start()
        await self.kubelet.wait_for(lambda k: all(k.streams(name) for name in before), _PATIENCE)
        return (time.perf_counter() - started) * 1000


def _outcome(resource: str, health: str, came: _Moment, device: str, began: _Moment, told: _Moment) -> Outcome:
    kernel = max(min(told.at, came.at) - began.at, 0.0)
    waited = min(max(came.waited - told.waited, 0.0), came.at - began.at - kernel)
    return Outcome(
        resource,
        device,
        health,
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
