"""A machine with its kubelet, on which the daemon runs in the tests' own process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.claims import ledger
from agent.config import AgentConfig, Config
from agent.daemon import reload
from agent.daemon.serving import Serving
from agent.daemon.supervisor import Agent
from agent.discovery.backend_answers import make_backends
from agent.discovery.sources import Emitted
from agent.kubelet import pod_claims
from agent.runtime.pacing import Clock
from agent.runtime.watchdog import Notifier
from agent.simulation.kubelet import Kubelet as SimulatedKubelet
from agent.simulation.model import Change, Container, Kind, Pod
from backends.base import (
    Backend,
    Host,
    Resource,
    ResourceSpec,
    Seconds,
)
from backends.stub import StubDevice, StubOptions
from tests.wait import limit, pass_time, until

TOY = "example.com/toy"
NEVER = Seconds(3600)


def toys(count: int = 3, name: str = TOY, numa_node: int | None = 0) -> Resource[Any]:
    """Stub devices, whose states the node's file says."""
    options = StubOptions([StubDevice(count, numa_node)], "/run/toys")
    return Resource(name, ResourceSpec("stub", options))


class Node:
    """A machine with its kubelet and its directories."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("dev", "sys", "proc", "run", "k/device-plugins"):
            (root / name).mkdir(parents=True)
        self.host = Host.below(root)
        self.kubelet = SimulatedKubelet(root / "k")
        self.kubelet.subscribe(self.note_list)
        self.listed: dict[str, bool] = {}  # of each stream that the agent of now has: whether a list has come
        self.ours = self.kubelet.plugin_dir / "fairlead"
        self._passed = 0.0
        self.clock, self.wall = self._later(time.monotonic), self._later(time.time)
        """Those of the agents here."""
        self.state = root / "state"
        self.notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notified.bind(str(root / "notify"))
        self.notified.setblocking(False)

    def config(self, *resources: Resource[Any]) -> Config:
        return Config(
            AgentConfig(
                self.kubelet.plugin_dir,
                self.root / "k",
                self.state,
                self.root / "admin.sock",
                uevents="off",
                resync=NEVER,
                probe=NEVER,
                boot_wait=Seconds(0),
            ),
            self.host,
            resources=resources,
        )

    def agent(self, *resources: Resource[Any], backends: Mapping[str, Backend[Any]] | None = None) -> Agent:
        known = [resource for resource in resources if resource.spec.backend not in (backends or {})]
        made = make_backends(self.host, known) | dict(backends or {})
        notifier = Notifier(str(self.root / "notify"))
        return Agent(self.config(*resources), made, notifier, clock=Clock(self.clock, self.wall))

    def _later(self, clock: Callable[[], float]) -> Callable[[], float]:
        """A clock, with the time that `pass_time` lets pass."""
        return lambda: clock() + self._passed

    def pass_time(self, seconds: float) -> None:
        """So many seconds pass at once, for the agents here and on the event loop."""
        self._passed += seconds
        pass_time(seconds)

    @asynccontextmanager
    async def running(
        self, *resources: Resource[Any], backends: Mapping[str, Backend[Any]] | None = None
    ) -> AsyncIterator[Agent]:
        agent = self.agent(*resources, backends=backends)
        task = asyncio.ensure_future(agent.run())
        try:
            yield agent
        finally:
            self.listed.clear()  # the kubelet may be late to notice the end, and then goes on showing the last lists
            await ended(task)
            assert task.cancelled() or task.exception() is None

    def note_list(self, change: Change) -> None:
        if change.kind is Kind.STREAM_OPENED:
            self.listed[change.resource] = False
        elif change.kind is Kind.LIST and change.resource in self.listed:
            self.listed[change.resource] = True

    def say(self, *lines: str) -> None:
        """Write the stub's file, as an editor does."""
        (self.root / "run" / ".toys").write_text("\n".join(lines))
        (self.root / "run" / ".toys").rename(self.root / "run" / "toys")

    def messages(self) -> list[str]:
        """What systemd was told since the last time."""
        told = []
        while True:
            try:
                told.append(self.notified.recv(4096).decode())
            except BlockingIOError:
                return told

    def sockets(self) -> list[str]:
        """The sockets of resources, without the digits that make each another."""
        found = [path for path in self.ours.glob("*.sock") if path.is_socket()] if self.ours.is_dir() else []
        return sorted({path.name.split("-", 1)[-1] for path in found})

    def shows(self, name: str, *, healthy: int, unhealthy: int = 0) -> bool:
        view = self.kubelet.resources.get(name)
        return (
            view is not None
            and (len(view.healthy), len(view.unhealthy)) == (healthy, unhealthy)
            and self.kubelet.streams(name) == 1
            and self.listed.get(name, False)  # else the view is that of an earlier stream
        )

    async def has(self, name: str, *, healthy: int, unhealthy: int = 0) -> None:
        await until(
            lambda: self.shows(name, healthy=healthy, unhealthy=unhealthy),
            f"the kubelet has {healthy} healthy and {unhealthy} unhealthy of {name} in one stream",
            lambda: (self.kubelet.resources.get(name), self.kubelet.streams(name), self.listed),
        )


def hear(agent: Agent, record: Emitted) -> None:
    """Tell the agent what the kernel would: a pretend node has no kernel that tells it of PCI functions."""
    agent._discovery.take(record)


async def put_in_force(agent: Agent, change: reload.Change) -> None:
    """Reload with backends that are made by a test."""
    await agent._swap.apply(change)


def serving_of(agent: Agent) -> Serving:
    """What serves the agent's resources."""
    return agent._serving


async def ended(task: asyncio.Future[None]) -> None:
    """Cancel an agent and wait for its end."""
    task.cancel()
    async with limit("the agent ends", asyncio.all_tasks):
        await asyncio.wait([task])


def pod(name: str = "pod", count: int = 1, resource: str = TOY) -> Pod:
    return Pod(name, (Container("app", {resource: count}),))


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the kubelet all the time who holds what; claims still stay young, until `come_of_age`."""
    monkeypatch.setattr(ledger, "MIN_AGE", NEVER)
    monkeypatch.setattr(ledger, "REWRITE_AFTER", 0.0)
    for name in ("IDLE", "_WHILE_ENDING", "_AFTER_ALLOCATE"):
        monkeypatch.setattr(pod_claims, name, 0.01)


def come_of_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubelet has had the time to record every pod: whatever claim it does not know of ends."""
    monkeypatch.setattr(ledger, "MIN_AGE", 0.0)
