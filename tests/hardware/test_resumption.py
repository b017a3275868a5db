from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agent.claims.ledger import Ledger
from agent.hardware import reconciler
from agent.hardware.adoption import Resumer
from agent.hardware.jobs import HardwareQueue
from agent.hardware.reconciler import Reconciler
from agent.inventory.inventory import Inventory
from agent.model import SlotKey
from backends.base import Device, Grant, Resource
from tests.background import running
from tests.fakes import KIND, Fake, by_unit, device, held, reconfigure, resource
from tests.wait import pass_time, settled, until

A, B = "a.example/one", "b.example/two"


class Claiming(Fake):
    """Remembers what it was asked to claim."""

    def __init__(self, *resources: Resource[Any]) -> None:
        super().__init__(*resources)
        self.told: list[tuple[str, str]] = []
        self.resources_told: list[Resource[Any]] = []
        self.do: Callable[[], object] = lambda: None

    def needs_claim(self, resource: Resource[Any]) -> bool:
        return resource.name != B

    def claim(self, resource: Resource[Any], grants: Sequence[Grant]) -> None:
        self.told += [(resource.name, grant.id) for grant in grants]
        self.resources_told.append(resource)
        self.do()


class House:
    """Pods that have devices since before, and what is there by now."""

    def __init__(self) -> None:
        resources = [resource(A), resource(B)]
        self.backend, self.turns, self.ledger = Claiming(*resources), HardwareQueue(), Ledger()
        self.inventory = Inventory(resources, {KIND: self.backend})
        self.looked: list[Set[str]] = []
        self.unknown: set[SlotKey] = set()
        self.reconciler = Reconciler(self.turns)
        told = self.reconciler, self._look, lambda slot: () if slot in self.unknown else ("pod",)
        self.it = Resumer({KIND: self.backend}, self.inventory, self.ledger, *told)

    async def _look(self, kind: str, units: Set[str]) -> None:
        assert kind == KIND
        self.looked.append(units)

    def show(self, *devices: Device, gone: tuple[str, ...] = ()) -> None:
        self.inventory.update(KIND, {**dict.fromkeys(gone, ()), **by_unit(devices)})

    def hold(self, name: str, found: Device, *, traced: bool = False) -> None:
        claims = [replace(held(name, found.key, found), traced=traced)]
        self.ledger.restore(claims, 0.0)
        self.inventory.claim(claims)

    def end(self, name: str, device_id: str) -> None:
        kept = {found.slot for found in self.ledger.held()} - {(name, device_id)}
        self.ledger.listed(kept, 1000.0, 1000.0, None)
        self.ledger.checkpoint(kept, (1,))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.it.resume()
        async with running(self.reconciler.run):
            yield

    async def resume(self) -> None:
        """Have all of it resumed, and wait for that."""
        async with self.running():
            await settled()


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon."""
    monkeypatch.setattr(reconciler, "RETRY_FIRST", 0.001)
    monkeypatch.setattr(reconciler, "RETRY_MOST", 0.01)


async def some_tries() -> None:
    for _ in range(3):
        await settled()
        pass_time(1.0)
    await settled()


async def test_what_pods_have_is_claimed_once_more_and_looked_at(house: House) -> None:
    x, y, z = device("x", A), device("y", B), device("z", A)
    house.show(x, y, z)
    house.hold(A, x)
    house.hold(B, y)  # nothing was done for it
    house.backend.do = lambda: house.show(device("x", A, numa_node=1), y, z)
    with capture_logs() as logs:
        await house.resume()
    assert house.backend.told == [(A, "x")]
    assert house.looked == [{"x"}]
    assert [(line["event"], line["device"]) for line in logs] == [("resumed", "x")]


async def test_what_another_plugin_gave_is_left_as_that_made_it(house: House) -> None:
    house.show(device("x", A), device("y", A))
    house.hold(A, device("x", A), traced=True)
    house.hold(A, device("y", A))
    await house.resume()
    assert house.backend.told == [(A, "y")]


async def test_nothing_is_said_where_nothing_had_to_be_done(house: House) -> None:
    house.show(device("x", A))
    house.hold(A, device("x", A))
    with capture_logs() as logs:
        await house.resume()
    assert house.backend.told == [(A, "x")]
    assert logs == []


async def test_a_pod_that_the_kubelet_has_not_named_is_waited_for(house: House) -> None:
    """It may have gone while we were away."""
    house.show(device("x", A), device("y", A))
    house.hold(A, device("x", A))
    house.hold(A, device("y", A))
    house.unknown = {(A, "x"), (A, "y")}
    async with house.running():
        await some_tries()
        assert house.backend.told == []
        assert not house.turns.have_effects()  # else hardware that goes and comes while we wait would be excused
        house.end(A, "x")
        house.unknown.clear()
        await until(lambda: house.looked == [{"y"}])
    assert house.backend.told == [(A, "y")]


async def test_a_device_that_comes_late_is_waited_for_and_another_in_its_place_is_left_alone(house: House) -> None:
    x = device("x", A, identity="serial 1")
    house.hold(A, x)
    house.show(device("x", A, identity="serial 2"))
    async with house.running():
        await some_tries()
        assert house.backend.told == []
        house.show(x)
        await until(lambda: house.looked == [{"x"}])


async def test_what_a_reload_changed_while_it_waited_is_claimed_as_it_is_configured_then(house: House) -> None:
    x = device("x", A, hardware=("pci:1",))
    house.show(x)
    house.hold(A, x)
    before = resource(A)
    now = replace(before, spec=replace(before.spec, pre_start="check"))
    async with house.running():
        async with house.turns.take(frozenset({"pci:1"})):
            await settled()
            reconfigure(house.inventory, [now], {KIND: house.backend})
        await until(lambda: house.looked == [{"x"}])
    assert house.backend.resources_told == [now]


async def test_what_another_backend_gave_under_that_name_is_left_alone(house: House) -> None:
    x = device("x", A)
    house.show(x)
    claims = [replace(held(A, "x", x), backend="other")]
    house.ledger.restore(claims, 0.0)
    house.inventory.claim(claims)
    with capture_logs() as logs:
        async with house.running():
            await some_tries()
    assert house.backend.told == []
    assert logs == []


async def test_it_waits_for_whoever_acts_on_what_was_learnt_of_a_claim_later(house: House) -> None:
    x = device("x", A, hardware=("pci:1",))
    unknown = held(A, "x")
    house.ledger.restore([unknown], 0.0)
    house.inventory.claim([unknown])
    async with house.running():
        house.show(x)
        await some_tries()
        assert house.backend.told == []
        async with house.turns.take(frozenset({"pci:1"})):
            house.inventory.claim(house.ledger.adopt({(A, "x"): KIND}, {(A, "x"): x}, 1.0))
            await some_tries()
            assert house.backend.told == []
        await until(lambda: house.looked == [{"x"}])
