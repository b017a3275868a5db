from __future__ import annotations

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
from agent.hardware.releases import Releaser, _together
from agent.model import Held
from backends import registry
from backends.base import Backend, Host, Released
from tests.background import running
from tests.fakes import Fake, device
from tests.wait import pass_time, settled, until

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
