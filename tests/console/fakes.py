"""A daemon that a test makes up, behind the Control that the faces ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from agent.console.control import NoSuchDeviceError, RefusedError
from agent.console.views import (
    Configuration,
    Device,
    Drained,
    Event,
    Explanation,
    Gift,
    HandedOver,
    Histories,
    History,
    Kubelet,
    Note,
    Period,
    Reloaded,
    Resource,
    Status,
    Undrained,
)

GPU = Device("GPU-1", ("GPU-1",), "Healthy", numa_node=0, ancestry=("pci0000:3a",), hardware=("pci:0000:3b:00.0",))


def status(*resources: Resource) -> Status:
    """A node with these resources, by default one GPU that is well."""
    return Status(
        "1.2.3",
        1000.0,
        2000.0,
        Kubelet("/plugins/kubelet.sock", True),
        Configuration("/etc/fairlead/config.toml", 1000.0),
        resources or (Resource("nvidia.com/gpu", "gpu", True, True, devices=(GPU,)),),
    )


@dataclass
class FakeDaemon:
    """Answers what it is told to; writes down what it was asked."""

    shown: Status = field(default_factory=status)
    asked: list[tuple[object, ...]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    news: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    mistakes: str = ""
    changed: Reloaded = field(default_factory=lambda: Reloaded(added=("a.b/new",)))
    unkept: str = ""
    gone: bool = False
    held: tuple[str, ...] = ()
    name: str = ""
    pods: tuple[str, ...] = ()
    besides: tuple[str, ...] = ()
    plain: tuple[Period, ...] = (Period(2000.0 - 86400.0, 2000.0, "Healthy"),)
    past: dict[str, tuple[Period, ...]] = field(default_factory=dict)
    """Of GPUs that changed, by their keys."""
    notes: tuple[Note, ...] = ()

    async def status(self) -> Status:
        return self.shown

    async def watch(self, last: int, *, follow: bool) -> AsyncGenerator[Event, None]:
        for event in self.events[-last:] if last else []:
            yield event
        while follow:
            event = await self.news.get()
            yield event

    async def explain(self, device: str) -> Explanation:
        self._known(device)
        return Explanation(device, "gpu", "0000:3b:00.0", numa_node=0, resource="nvidia.com/gpu", gift=Gift({"A": "b"}))

    async def history(self, device: str) -> History:
        self._known(device)
        return History(device, "nvidia.com/gpu", self.past.get(device, self.plain))

    async def histories(self) -> Histories:
        others = tuple(History(key, "nvidia.com/gpu", periods) for key, periods in self.past.items())
        return Histories(self.plain, others, self.notes)

    async def drain(self, device: str, reason: str, until: float | None) -> Drained:
        self._known(device)
        if until is not None and until < self.shown.now:
            raise RefusedError("that time is past")
        self.asked.append(("drain", device, reason, until))
        return Drained(() if self.gone else (device,), self.held, self.unkept, (), self.name, self.pods, self.besides)

    async def undrain(self, device: str) -> Undrained:
        self._known(device)
        self.asked.append(("undrain", device))
        return Undrained((device,), ("drained",), self.name)

    async def hand_over(self) -> HandedOver:
        return HandedOver("4711 1.2.3")

    async def reload(self) -> Reloaded:
        if self.mistakes:
            raise RefusedError(self.mistakes)
        return self.changed

    def _known(self, device: str) -> None:
        if device != "GPU-1":
            raise NoSuchDeviceError(f"there is no device {device!r}; did you mean 'GPU-1'?")
