from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from hypothesis import given, strategies
from structlog.testing import capture_logs

from agent.claims.ledger import Ledger
from agent.hardware import reconciler
from agent.hardware.jobs import HardwareQueue
from agent.hardware.reconciler import Reconciler
from agent.hardware.releases import RELEASE_DEADLINE, Releaser, _together
from agent.model import Held
from agent.runtime.pacing import Doorbell
from backends import registry
from backends.base import Backend, Host, Released
from tests.background import running
from tests.fakes import Fake, device
from tests.wait import PATIENCE, pass_time, settled, until

A = "a.example/one"


class Releasing(Fake):
    """Remembers what it was told."""

    def __init__(self, *_ignored: Any) -> None:
        super().__init__()
        self.told: list[tuple[list[Released], frozenset[str]]] = []
        self.do: Callable[[], object] = lambda: None

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:
        self.told.append((list(ended), idle))
        self.do()

    @property
    def ids(self) -> list[list[str]]:  # type: ignore[override]  # of each call; no resource is asked for here
        return [sorted(released.id for released in ended) for ended, _ in self.told]


def claim(device_id: str, *hardware: str, kind: str = "fake") -> Held:
    return Held(A, device_id, kind, frozenset(hardware))


class House:
    """A releaser with all that it works on."""

    def __init__(self, **backends: Backend[Any]) -> None:
        self.backend = Releasing()
        self.ledger = Ledger()
        self.turns = HardwareQueue()
        self.changes: list[tuple[Held, ...]] = []
        self.reconciler = Reconciler(self.turns)
        self.it = Releaser(Host(), backends or {"fake": self.backend}, self.ledger, self.reconciler, self._changed)

    def _changed(self) -> None:
        self.changes.append(self.it.pending())

    def running(self) -> AbstractAsyncContextManager[None]:
        return running(self.reconciler.run)

    async def undo(self, *ended: Held) -> None:
        """Have these undone, and wait for that."""
        async with self.running():
            self.it.add(ended)
            await until(lambda: not self.it.pending())


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon."""
    monkeypatch.setattr(reconciler, "RETRY_FIRST", 0.001)


def said(logs: Iterable[Any]) -> list[str]:
    return [line["event"] for line in logs]


async def test_a_backend_is_told_what_ended_and_what_nobody_holds_any_more(house: House) -> None:
    house.ledger.allocate([claim("z", "shared")], 0.0)
    await house.undo(claim("x", "shared", "x"), claim("y", "y"))
    assert sorted(house.backend.told, key=str) == sorted(
        [
            ([Released(A, "x", frozenset({"shared", "x"}))], frozenset({"x"})),
            ([Released(A, "y", frozenset({"y"}))], frozenset({"y"})),
        ],
        key=str,
    )
    assert house.changes[-1] == ()


async def test_what_shares_hardware_is_undone_in_one_call(house: House) -> None:
    await house.undo(claim("a", "1"), claim("b", "1", "2"), claim("c", "3"), claim("d", "2"))
    assert sorted(house.backend.ids) == [["a", "b", "d"], ["c"]]


async def test_each_backend_is_told_its_own_and_one_that_fails_takes_none_with_it() -> None:
    broken, well = Releasing(), Releasing()
    broken.do = lambda: 1 / 0
    house = House(broken=broken, well=well)
    x = claim("x", "same", kind="broken")
    with capture_logs() as logs:
        async with house.running():
            house.it.add([x, claim("y", kind="well")])
            await until(lambda: len(broken.told) > 3 and house.it.pending() == (x,))
    assert well.ids == [["y"]]
    failures = [(line["event"], line["backend"], line["slots"], line["reason"]) for line in logs]
    assert failures == [("release-failed", "broken", [f"{A}/x"], "division by zero")], (
        "said once, however often it fails"
    )


async def test_each_distinct_complaint_is_said_once_and_that_it_works_again(house: House) -> None:
    errors = [OSError("busy"), OSError("busy"), LookupError("gone"), LookupError("gone")]

    def fail() -> None:
        if errors:
            raise errors.pop(0)

    house.backend.do = fail
    with capture_logs() as logs:
        await house.undo(claim("x"))
    assert said(logs) == ["release-failed", "release-failed", "release-succeeded"]
    assert house.backend.ids == [["x"]] * 5


async def test_it_is_tried_again_later_and_later(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "RETRY_FIRST", 1.0)
    waits: list[float] = []
    wait = Doorbell.rung

    async def note(bell: Doorbell, at_most: float) -> None:
        if 0.0 < at_most < math.inf:
            waits.append(math.ceil(at_most))
            asyncio.get_running_loop().call_soon(pass_time, at_most)
        await wait(bell, at_most)

    monkeypatch.setattr(Doorbell, "rung", note)
    house.backend.do = lambda: 1 / 0 if len(house.backend.told) < 10 else None
    await house.undo(claim("x"))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


async def test_one_that_hangs_is_reported_costs_one_thread_and_holds_up_no_other(house: House) -> None:
    gate = threading.Event()
    house.backend.do = lambda: gate.wait(PATIENCE)
    before = threading.active_count()
    with capture_logs() as logs:
        async with house.running():
            house.it.add([claim("x", "x")])
            await until(lambda: house.backend.told)
            for _ in range(6):  # the deadline, and then further tries
                pass_time(RELEASE_DEADLINE)
                await settled()
            assert logs
            assert house.backend.ids == [["x"]], "never twice at a time"
            assert threading.active_count() <= before + 1
            house.backend.do = lambda: None
            house.it.add([claim(f"y{n}", f"y{n}") for n in range(8)])
            await until(lambda: house.it.pending() == (claim("x", "x"),))
            gate.set()
            await until(lambda: not house.it.pending())
    assert [(line["event"], line.get("reason")) for line in logs if line.get("slots") == [f"{A}/x"]] == [
        ("release-failed", "not done within 30 s"),
        ("release-succeeded", None),
    ]


async def test_that_no_thread_is_left_is_said_once_for_all_that_wait(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "RETRY_FIRST", 1.0)
    gate = threading.Event()
    house.backend.do = lambda: gate.wait(PATIENCE)
    with capture_logs() as logs:
        async with house.running():
            house.it.add([claim(f"hangs{n}", f"h{n}") for n in range(4)])
            await until(lambda: len(house.backend.told) == 4)
            pass_time(RELEASE_DEADLINE)
            await until(lambda: len(logs) == 4)
            house.it.add([claim("x", "x")])
            await settled()
            assert said(logs)[4:] == ["hardware-waits"], "once for all that wait"
            gate.set()
            pass_time(1.0)
            await until(lambda: not house.it.pending())
    assert {tuple(line["slots"]) for line in logs if "slots" in line} == {(f"{A}/hangs{n}",) for n in range(4)}


async def test_a_timeout_of_the_backends_own_is_its_failure(house: House) -> None:
    def fail() -> None:
        if len(house.backend.told) == 1:
            raise TimeoutError("the card did not answer")

    house.backend.do = fail
    with capture_logs() as logs:
        await house.undo(claim("x"))
    assert logs[0]["reason"] == "the card did not answer"


async def test_more_that_end_at_once_than_there_are_threads_wait_without_a_word(house: House) -> None:
    with capture_logs() as logs:
        await house.undo(*(claim(f"x{n}", f"x{n}") for n in range(50)))
    assert (len(house.backend.told), logs) == (50, [])


async def test_a_claim_that_begins_while_its_release_waits_is_not_undone(house: House) -> None:
    async with house.running():
        async with house.turns.take({"x"}):
            house.it.add([claim("x", "x"), claim("other", "x", "y")])
            await settled()
            house.ledger.allocate([claim("x", "x")], 0.0)
        await until(lambda: not house.it.pending())
    assert house.backend.told == [([Released(A, "other", frozenset({"x", "y"}))], frozenset({"y"}))]


async def test_what_is_claimed_again_is_not_tried_again(house: House) -> None:
    house.backend.do = lambda: 1 / 0
    async with house.running():
        house.it.add([claim("x", "x")])
        await until(lambda: len(house.backend.told) > 1)
        house.ledger.allocate([claim("x", "x")], 0.0)
        await until(lambda: not house.it.pending())
    assert house.changes[-1] == (), "and it is not kept for our next run"


async def test_what_ends_again_while_an_earlier_release_fails_is_undone_once_more(house: House) -> None:
    house.backend.do = lambda: 1 / 0
    async with house.running():
        house.it.add([claim("x", "old")])
        await until(lambda: bool(house.backend.told))
        house.it.add([claim("x", "new")])
        house.backend.do = lambda: None
        await until(lambda: not house.it.pending())
    assert house.backend.told[-1] == ([Released(A, "x", frozenset({"new"}))], frozenset({"new"}))


async def test_what_ends_meanwhile_does_not_hurry_what_failed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "RETRY_FIRST", 1000.0)
    house.backend.do = lambda: 1 / 0
    async with house.running():
        house.it.add([claim("x", "x")])
        await until(lambda: bool(house.backend.told))
        house.backend.do = lambda: None
        house.it.add([claim("y", "y")])
        await until(lambda: len(house.it.pending()) == 1)
    assert house.backend.ids == [["x"], ["y"]]


async def test_what_was_not_undone_is_taken_up_when_it_is_started_again(house: House) -> None:
    x, gate = claim("x", "x"), threading.Event()
    house.backend.do = lambda: gate.wait(PATIENCE)
    async with house.running():
        house.it.add([x])
        await until(lambda: bool(house.backend.told))
    assert house.it.pending() == (x,)
    gate.set()
    async with house.running():
        await until(lambda: not house.it.pending())
    assert house.backend.ids == [["x"], ["x"]]


async def test_a_backend_that_the_config_no_longer_names_is_made_once_for_its_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Releasing] = []

    def load(kind: str) -> Callable[..., Releasing]:
        assert kind == "retired"
        made.append(Releasing())
        return lambda _host, _resources: made[-1]

    monkeypatch.setattr(registry, "load", load)
    house = House(other=Fake())
    await house.undo(claim("x", kind="retired"))
    await house.undo(claim("y", kind="retired"))
    assert len(made) == 1
    assert made[0].ids == [["x"], ["y"]]


async def test_the_instance_in_force_undoes_what_one_before_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    before, now, spare = Releasing(), Releasing(), Releasing()
    monkeypatch.setattr(registry, "load", lambda _kind: lambda _host, _resources: spare)
    in_force: dict[str, Backend[Any]] = {"fake": before}
    house = House()
    house.it = Releaser(Host(), in_force, house.ledger, house.reconciler)
    in_force["fake"] = now
    await house.undo(claim("x"))
    del in_force["fake"]
    await house.undo(claim("y"))
    assert (before.ids, now.ids, spare.ids) == ([], [["x"]], [["y"]])


async def test_a_backend_that_is_no_longer_installed_is_said_once_and_waited_for(house: House) -> None:
    with capture_logs() as logs:
        async with house.running():
            house.it.add([claim("x", kind="uninstalled")])
            for _ in range(4):  # some tries
                await settled()
                pass_time(60.0)
    assert said(logs) == ["release-failed"]
    assert len(house.it.pending()) == 1


async def test_a_backend_that_undoes_nothing_is_not_asked_for_a_thread() -> None:
    house = House(fake=Fake())
    house.it.add([Held(A, "x", "fake", device("x").hardware)])
    assert house.it.pending() == ()


@given(strategies.lists(strategies.tuples(strategies.integers(0, 9), strategies.frozensets(strategies.integers(0, 9)))))
def test_pieces_share_no_hardware_and_leave_nothing_out(given: list[tuple[int, frozenset[int]]]) -> None:
    ended = {number: claim(str(number), *map(str, hardware)) for number, hardware in given}
    pieces = [[ended[int(device_id)] for _, device_id in slots] for _, slots in _together(ended.values())]
    assert sorted(held.id for piece in pieces for held in piece) == sorted(map(str, ended))
    hardware = [frozenset(h for held in piece for h in held.hardware) for piece in pieces]
    assert sum(map(len, hardware)) == len(frozenset().union(*hardware))
    for piece in pieces:  # and none is larger than it must be
        reached, grows = {piece[0].id} | set(piece[0].hardware), True
        while grows:
            before = len(reached)
            for held in piece:
                if held.id in reached or not reached.isdisjoint(held.hardware):
                    reached |= {held.id, *held.hardware}
            grows = len(reached) > before
        assert {held.id for held in piece} <= reached
