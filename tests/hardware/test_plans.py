"""What holds for all work on hardware, adoption, resumption and release: it is done once, or tried again until it is."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

import pytest
from structlog.testing import capture_logs

from agent.claims.ledger import Ledger
from agent.hardware import reconciler
from agent.hardware.adoption import READY_DEADLINE, Adopter, Resumer
from agent.hardware.jobs import HardwareQueue
from agent.hardware.reconciler import RETRY_MOST, Reconciler
from agent.hardware.releases import RELEASE_DEADLINE, Releaser
from agent.inventory.inventory import Inventory
from agent.runtime.pacing import Doorbell
from agent.runtime.workers import LIMIT
from backends.base import AllocationRefused, Device, Grant, Host, NotReady, Released, Resource
from tests.background import running
from tests.fakes import KIND, Fake, by_unit, device, held, resource
from tests.wait import PATIENCE, pass_time, settled, until

NAME = "a.example/one"


class Acting(Fake):
    """A backend that acts on hardware, all three ways."""

    def __init__(self, act: Callable[[str], object]) -> None:
        super().__init__(resource(NAME))
        self._act = act

    def adopts(self, resource: Resource[Any]) -> bool:
        return True

    def adopt(self, resource: Resource[Any], device: Device) -> bool:
        self._act(device.key)
        return True

    def needs_claim(self, resource: Resource[Any]) -> bool:
        return True

    def claim(self, resource: Resource[Any], grants: Sequence[Grant]) -> None:
        for grant in grants:
            self._act(grant.id)

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:
        for released in ended:
            self._act(released.id)


class Plan:
    """Work on devices, each of which is its own hardware."""

    failed: ClassVar = ""
    """The event that tells of a failure."""
    deadline = READY_DEADLINE

    def __init__(self) -> None:
        self.tried: list[str] = []
        self.do: Callable[[str], object] = lambda _name: None
        """What the backend does with a device, in its thread."""
        self.backend = Acting(self._act)
        self.turns, self.ledger = HardwareQueue(), Ledger()
        self.reconciler = Reconciler(self.turns)
        self.inventory = Inventory([resource(NAME)], {KIND: self.backend})
        self.inventory.ready(KIND)

    def _act(self, name: str) -> None:
        self.tried.append(name)
        self.do(name)

    def running(self) -> AbstractAsyncContextManager[None]:
        return running(self.reconciler.run)

    def problems(self) -> int:
        """How many problems are reported now."""
        return len(self.reconciler.problems.lasting())

    def show(self, *names: str, gone: Sequence[str] = ()) -> None:
        devices = [device(name, NAME) for name in names]
        self.inventory.update(KIND, {**dict.fromkeys(gone, ()), **by_unit(devices)})

    async def look_at(self, kind: str, units: Set[str]) -> None:
        """What was done is looked at."""

    async def looked(self) -> None: ...

    async def begin(self, *names: str) -> None:
        """Want it for these devices; to be called once."""
        raise NotImplementedError

    def end(self, name: str) -> None:
        """Want it no more for this device."""
        raise NotImplementedError


class Adoption(Plan):
    failed = "not-adopted"

    def __init__(self) -> None:
        super().__init__()
        self.it = Adopter({KIND: self.backend}, self.inventory, self.reconciler, self)
        self.it.configure([resource(NAME)])

    def show(self, *names: str, gone: Sequence[str] = ()) -> None:
        super().show(*names, gone=gone)
        for snapshot in self.inventory.take():
            self.it.listed(snapshot)

    async def begin(self, *names: str) -> None:
        self.show(*names)

    def end(self, name: str) -> None:
        self.show(gone=[name])


class Resumption(Plan):
    failed = "not-resumed"

    def __init__(self) -> None:
        super().__init__()
        pods = self.reconciler, self.look_at, lambda _slot: ["pod"]
        self.it = Resumer({KIND: self.backend}, self.inventory, self.ledger, *pods)

    async def begin(self, *names: str) -> None:
        self.show(*names)
        claims = [held(NAME, name, device(name, NAME)) for name in names]
        self.ledger.restore(claims, 0.0)
        self.inventory.claim(claims)
        await self.it.resume()

    def end(self, name: str) -> None:
        kept = {found.slot for found in self.ledger.held()} - {(NAME, name)}
        self.ledger.listed(kept, 1000.0, 1000.0, None)
        self.it.over(self.ledger.checkpoint(kept, (1,)))


class Release(Plan):
    failed, deadline = "release-failed", RELEASE_DEADLINE

    def __init__(self) -> None:
        super().__init__()
        self.it = Releaser(Host(), {KIND: self.backend}, self.ledger, self.reconciler)

    async def begin(self, *names: str) -> None:
        self.it.add([held(NAME, name, device(name)) for name in names])

    def end(self, name: str) -> None:
        self.ledger.allocate([held(NAME, name, device(name))], 0.0)


@pytest.fixture(params=[Adoption, Resumption, Release])
def plan(request: pytest.FixtureRequest) -> Plan:
    made: Plan = request.param()
    return made


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon."""
    monkeypatch.setattr(reconciler, "RETRY_FIRST", 0.001)
    monkeypatch.setattr(reconciler, "RETRY_MOST", 0.001)


async def hour() -> None:
    """Have all tries of an hour made."""
    for _ in range(3):
        pass_time(1200.0)
        await settled()


async def test_it_is_done_once_however_many_wait_and_without_a_word(plan: Plan) -> None:
    names = {f"x{n}" for n in range(50)}
    with capture_logs() as logs:
        async with plan.running():
            await plan.begin(*names)
            await settled()
            await hour()
    assert sorted(plan.tried) == sorted(names)
    assert [line for line in logs if line["log_level"] != "info"] == []
    assert not plan.turns.is_taken(names)


@pytest.mark.usefixtures("hasty")
async def test_what_fails_is_told_once_for_each_reason_tried_until_it_works_and_holds_up_no_other(plan: Plan) -> None:
    errors: list[Exception] = [NotReady("busy"), AllocationRefused("busy"), OSError("gone"), OSError("gone")]

    def fail(name: str) -> None:
        if name == "x" and errors:
            raise errors.pop(0)

    plan.do = fail
    with capture_logs() as logs:
        async with plan.running():
            await plan.begin("x", "y")
            await until(lambda: plan.tried.count("x") == 5 and "y" in plan.tried)
            await until(lambda: not plan.problems())
    told = [(line["reason"], "exc_info" in line) for line in logs if line["event"] == plan.failed]
    assert told == [("busy", False), ("gone", True)]
    assert plan.tried.count("y") == 1


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), TimeoutError("the card did not answer")])
async def test_an_error_of_the_backends_own_is_told_with_where_it_came_from(plan: Plan, error: Exception) -> None:
    def fail(_name: str) -> None:
        raise error

    plan.do = fail
    with capture_logs() as logs:
        async with plan.running():
            await plan.begin("x")
            await until(lambda: len(plan.tried) > 3)
    (line,) = logs
    assert (line["event"], line["reason"], line["exc_info"]) == (plan.failed, str(error), error)


async def test_it_is_tried_again_later_and_later(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, wait = list[float](), Doorbell.rung

    async def note(bell: Doorbell, at_most: float) -> None:
        if 0.0 < at_most < math.inf:
            waits.append(math.ceil(at_most))
            asyncio.get_running_loop().call_soon(pass_time, at_most)
        await wait(bell, at_most)

    monkeypatch.setattr(Doorbell, "rung", note)
    plan.do = lambda _name: 1 / 0 if len(plan.tried) < 10 else None
    with capture_logs():
        async with plan.running():
            await plan.begin("x")
            await until(lambda: len(plan.tried) == 10 and not plan.problems())
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


async def test_one_that_hangs_is_told_costs_one_thread_and_holds_up_no_other(plan: Plan) -> None:
    gate, before = threading.Event(), threading.active_count()
    plan.do = lambda name: name != "x" or gate.wait(PATIENCE)
    with capture_logs() as logs:
        async with plan.running():
            await plan.begin("x", "y")
            await until(lambda: {*plan.tried} == {"x", "y"})
            await settled()
            for _ in range(6):  # the deadline, and then further tries
                pass_time(plan.deadline)
                await settled()
            assert plan.tried.count("x") == 1, "never twice at a time"
            assert threading.active_count() <= before + 2
            assert plan.problems() == 1
            gate.set()
            await until(lambda: not plan.turns.is_taken({"x"}))
            pass_time(RETRY_MOST)
            await until(lambda: not plan.problems())
    told = [line["reason"] for line in logs if line["event"] == plan.failed]
    assert told == [f"not done within {plan.deadline:g} s"]


async def test_that_no_thread_is_left_is_told_once_for_all_that_wait(plan: Plan) -> None:
    gate = threading.Event()
    plan.do = lambda _name: gate.wait(PATIENCE)
    with capture_logs() as logs:
        async with plan.running():
            await plan.begin(*(f"x{n}" for n in range(LIMIT + 3)))
            await until(lambda: len(plan.tried) == LIMIT)
            pass_time(plan.deadline)  # those that hang let others try
            await settled()
            pass_time(RETRY_MOST)
            await settled()
            assert len(plan.tried) == LIMIT
            gate.set()
            await until(lambda: not plan.turns.is_taken({f"x{n}" for n in range(LIMIT + 3)}))
            await hour()
            assert plan.problems() == 0
    told = [line["event"] for line in logs if line["event"].startswith("hardware-")]
    assert told == ["hardware-waits", "hardware-goes-on"]
    assert {*plan.tried} == {f"x{n}" for n in range(LIMIT + 3)}


@pytest.mark.parametrize("still_wanted", [True, False])
async def test_it_waits_for_whoever_acts_on_the_hardware_and_is_not_done_if_no_longer_wanted_then(
    plan: Plan, still_wanted: bool
) -> None:
    async with plan.running():
        async with plan.turns.take({"x"}):
            await plan.begin("x")
            await settled()
            assert plan.tried == []
            if not still_wanted:
                plan.end("x")
        await settled()
        await hour()
    assert plan.tried == ["x"] * still_wanted


async def test_what_failed_is_no_problem_and_not_tried_once_it_is_no_longer_wanted(plan: Plan) -> None:
    plan.do = lambda _name: 1 / 0
    with capture_logs():
        async with plan.running():
            await plan.begin("x")
            await until(plan.problems)
            await settled()
            plan.end("x")
            await hour()
            assert plan.problems() == 0
    assert plan.tried == ["x"]


async def test_what_hangs_when_the_agent_stops_is_tried_again_by_its_next_run(plan: Plan) -> None:
    gate = threading.Event()
    plan.do = lambda _name: gate.wait(PATIENCE)
    async with plan.running():
        await plan.begin("x")
        await until(lambda: plan.tried)
    assert plan.turns.is_taken({"x"}), "as long as its thread acts"
    gate.set()
    await until(lambda: not plan.turns.is_taken({"x"}))
    async with plan.running():
        await settled()
        await hour()
    assert plan.tried == ["x", "x"]
