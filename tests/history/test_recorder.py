"""What is noted of the devices of a resource, run after run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import anyio
import pytest

from agent.history import recorder
from agent.history.recorder import Recorder
from agent.history.timeline import Period
from agent.inventory.shortfall import Shortfall
from agent.model import Health, SlotKey, Snapshot, State
from agent.runtime.pacing import Clock
from backends.base import Device
from tests.fakes import KIND, by_unit, device, held, inventory, resource
from tests.wait import settled, until

A = "a.example/one"
START = 1e9
X, Y = (device(key, A, hardware=[f"pci:{key}"], ids=[f"GPU-{key}"]) for key in "xy")
ILL = Health(State.UNHEALTHY, "xid-79", "It has fallen off the bus.")
DRAINED = Health(State.UNHEALTHY, "drained", "an operator drained it: new fan")


class Run:
    """One run of the daemon, in which a second is as long as a test likes."""

    def __init__(self, *devices: Device, before: Run | None = None) -> None:
        self.inventory = inventory(resource(A), devices=devices)
        self.now: float = before.now if before else 0.0
        self.lists: dict[str, Snapshot] = {}
        self.pods: Mapping[SlotKey, tuple[str, ...]] = {}
        self.wall: Callable[[], float] = lambda: START + self.now
        clock = Clock(lambda: self.now, lambda: self.wall())
        self.shortfall = Shortfall(self.inventory, clock)
        self.it = Recorder(
            self.inventory,
            self.lists.get,
            lambda slot: self.pods.get(slot, ()),
            self.shortfall,
            clock=clock,
        )
        if before:
            self.shortfall.restore(before.shortfall.offered, another_boot=False)
            self.it.restore(before.it.record())

    async def begin(self) -> Run:
        await self.publish()
        await self.it.begin()
        await self.claims()
        return self

    async def publish(self) -> None:
        for snapshot in self.inventory.take():
            before = self.lists.get(snapshot.resource)
            self.lists[snapshot.resource] = snapshot
            await self.it.listed(before.slots if before else None, snapshot)

    async def claims(self) -> None:
        await self.it._look_at_claims()

    async def end(self) -> Run:
        await self.shortfall.look({KIND})
        self.it.end()
        return self

    async def is_now(self, health: Mapping[str, Health]) -> None:
        self.inventory.set_health(health)
        await self.publish()

    async def goes(self, *devices: Device) -> None:
        await self.shortfall.look({KIND})
        self.inventory.update(KIND, {it.unit: () for it in devices})
        await self.publish()
        await self.shortfall.look({KIND})

    async def comes(self, *devices: Device) -> None:
        self.inventory.update(KIND, by_unit(devices))
        await self.publish()

    def told(self, key: str = "x") -> list[tuple[int, str]]:
        """From which second on it was in which state, since this test began."""
        return [(round(it.begins - START), it.condition.state) for it in self.of(key) if it.ends > START]

    def holders(self, key: str = "x") -> list[tuple[str, ...]]:
        return [it.condition.holders for it in self.of(key)[1:]]

    def of(self, key: str) -> list[Period]:
        return self.it.of((A, key))


async def test_a_device_that_fails_is_drained_and_recovers_has_its_times_and_reasons() -> None:
    run = await Run(X, Y).begin()
    for now, health in ((100, ILL), (200, DRAINED), (300, Health(State.HEALTHY))):
        run.now = now
        await run.is_now({"pci:x": health})
    run.now = 400
    assert run.told() == [(0, "Healthy"), (100, "Unhealthy"), (200, "Drained"), (300, "Healthy")]
    assert [it.condition.reason for it in run.of("x")][2:4] == ["xid-79", "drained"]
    assert run.told("y") == [(0, "Healthy")]
    assert set(run.it.devices()) == {(A, "x")}  # what never changed takes no room


async def test_a_device_that_fails_within_a_second_of_the_start_was_healthy_before() -> None:
    first = await Run(X, Y).begin()
    first.now = 100
    await first.end()
    first.now = 200
    run = Run(X, Y, before=first)
    await run.it.begin()
    run.now = 201
    run.inventory.set_health({"pci:y": ILL})
    await run.publish()  # the first list
    run.now = 201.5
    await run.is_now({"pci:x": ILL})
    run.now = 300
    assert run.told()[-3:] == [(100, "Unknown"), (200, "Healthy"), (202, "Unhealthy")]
    assert run.told("y")[-2:] == [(100, "Unknown"), (200, "Unhealthy")]


async def test_a_device_that_goes_and_comes_back_was_gone_meanwhile() -> None:
    run = await Run(X, Y).begin()
    run.now = 100
    await run.goes(X)
    run.now = 200
    await run.comes(X, device("z", A))
    run.now = 300
    assert run.told() == [(0, "Healthy"), (100, "Gone"), (200, "Healthy")]
    assert run.told("z") == [(0, "Gone"), (200, "Healthy")]


async def test_what_a_pod_holds_and_that_is_gone_is_told_of_under_its_own_name() -> None:
    run = await Run(X).begin()
    run.now = 100
    run.inventory.claim([held(A, "GPU-x", X)])
    run.pods = {(A, "GPU-x"): ("default/train",)}
    await run.claims()
    run.now = 200
    await run.goes(X)
    await run.claims()
    run.now = 300
    run.inventory.unclaim([held(A, "GPU-x", X)])
    run.pods = {}
    await run.publish()
    await run.claims()
    run.now = 400
    assert set(run.it.devices()) == {(A, "x")}
    assert run.told() == [(0, "Healthy"), (100, "Healthy"), (200, "Gone"), (300, "Gone")]
    assert run.holders() == [(), ("default/train",), ("default/train",), ()]


async def test_pods_are_told_by_name_once_the_kubelet_has_named_them_and_of_everybodys_device_none_is() -> None:
    crowded = device("kvm", A, ids=[f"kvm-{n}" for n in range(17)])
    run = await Run(X, crowded).begin()
    run.inventory.claim([held(A, "GPU-x", X), held(A, "kvm-3", crowded)])
    for pods in ({}, {(A, "GPU-x"): tuple(f"default/p{n}" for n in range(6))}, {}):
        run.now += 100
        run.pods = pods
        await run.claims()
    named = ("default/p0", "default/p1", "default/p2", "default/p3", "and 2 more")
    run.now += 1
    assert run.holders() == [(), ("a pod that the kubelet has not named",), named]
    assert set(run.it.devices()) == {(A, "x")}


async def test_a_device_with_fewer_ids_than_before_is_not_gone() -> None:
    several = device("x", A, ids=["x-0", "x-1"])
    run = await Run(several).begin()
    run.now = 100
    await run.comes(device("x", A, ids=["x-0"]))
    run.now = 200
    await run.comes(several)
    run.now = 300
    assert run.told() == [(0, "Healthy")]


async def test_the_next_run_goes_on_and_between_them_nothing_is_known() -> None:
    first = await Run(X, Y).begin()
    first.now = 100
    await first.is_now({"pci:x": ILL})
    first.now = 200
    await first.end()
    first.now = 300
    new = device("new", A)
    second = await Run(X, new, before=first).begin()  # X is well again, Y is gone
    second.now = 400
    assert second.told() == [(0, "Healthy"), (100, "Unhealthy"), (200, "Unknown"), (300, "Healthy")]
    assert second.told("y") == [(0, "Healthy"), (200, "Unknown"), (300, "Gone")]
    assert second.told("new") == [(0, "Gone"), (200, "Unknown"), (300, "Healthy")]


async def test_nothing_is_noted_while_another_agent_does() -> None:
    run = Run(X)
    await run.publish()
    await run.is_now({"pci:x": ILL})
    assert not run.it.devices()
    run.now = 100
    await run.it.begin()
    run.now = 200
    assert run.told() == [(-86200, "Unknown"), (100, "Unhealthy")]


async def test_time_that_passes_while_it_is_told_is_not_unknown() -> None:
    run, ticks = await Run(X).begin(), itertools.count(START + 100)
    run.now = 100
    run.wall = lambda: next(ticks)
    assert [it.condition.state for it in run.of("x")] == ["Unknown", "Healthy"]


async def test_a_clock_that_is_set_moves_the_runs_begin_along() -> None:
    run = await Run(X).begin()
    run.now = 100
    wall = run.wall
    run.wall = lambda: wall() + 1e6
    assert [it.condition.state for it in run.of("x")] == ["Unknown", "Healthy"]
    assert run.of("x")[1].begins == START + 1e6


async def test_it_is_saved_when_something_changed_and_else_every_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_PAUSE", 0.0)
    run, saved = Run(X), list[float]()

    async def save() -> None:
        saved.append(run.now)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run.it.run, save)
        await until(lambda: saved == [0])
        for now, change in ((10, None), (20, ILL), (30, None), (319, None), (320, None)):
            run.now = now
            if change:
                await run.is_now({"pci:x": change})
            run.it.claims_changed()
            await until(lambda: not run.it._changed.is_set())
            await settled()
        tasks.cancel_scope.cancel()
    assert saved == [0, 20, 320]
