from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agent.hardware import reconciler
from agent.hardware.adoption import Adopter
from agent.hardware.jobs import HardwareQueue
from agent.hardware.reconciler import Reconciler
from agent.inventory.inventory import Inventory
from backends.base import Device, NotReady, Resource
from tests.background import running
from tests.fakes import KIND, Fake, by_unit, device, reconfigure, resource
from tests.wait import pass_time, settled, until

A, B = "a.example/one", "b.example/two"


class Adopting(Fake):
    """Remembers what it was asked to adopt."""

    def __init__(self, *resources: Resource[Any]) -> None:
        super().__init__(*resources)
        self.told: list[tuple[str, str]] = []
        self.do: Callable[[], bool] = lambda: True

    def adopts(self, resource: Resource[Any]) -> bool:
        return resource.name != B

    def adopt(self, resource: Resource[Any], device: Device) -> bool:
        self.told.append((resource.name, device.key))
        return self.do()


class House:
    """An adopter with all that it works on."""

    def __init__(self) -> None:
        resources = [resource(A), resource(B)]
        self.backend = Adopting(*resources)
        self.turns = HardwareQueue()
        self.looks: list[tuple[str, Set[str]]] = []
        self.inventory = Inventory(resources, {KIND: self.backend})
        self.inventory.ready(KIND)
        self.reconciler = Reconciler(self.turns)
        self.it = Adopter({KIND: self.backend}, self.inventory, self.reconciler, self)
        self.configure(*resources)

    def configure(self, *resources: Resource[Any]) -> None:
        self.it.configure(resources)

    async def look_at(self, kind: str, units: Set[str]) -> None:
        self.looks.append((kind, units))

    async def looked(self) -> None: ...

    def show(self, *devices: Device, gone: tuple[str, ...] = ()) -> None:
        self.inventory.update(KIND, {**dict.fromkeys(gone, ()), **by_unit(devices)})
        for snapshot in self.inventory.take():
            self.it.listed(snapshot)

    def running(self) -> AbstractAsyncContextManager[None]:
        return running(self.reconciler.run)


@pytest.fixture
def house() -> House:
    return House()


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon."""
    monkeypatch.setattr(reconciler, "RETRY_FIRST", 0.001)


async def test_a_device_that_joins_is_adopted_and_looked_at_again(house: House) -> None:
    house.show(device("x", A, unit="u"))
    async with house.running():
        await until(lambda: house.looks == [(KIND, {"u"})])
        house.show(device("y", A))
        await until(lambda: len(house.looks) == 2)
    assert house.backend.told == [(A, "x"), (A, "y")]


async def test_what_is_adopted_each_time_it_comes_back_is_not_said_to_come_and_go_because_of_that(house: House) -> None:
    house.show(device("x", A))
    async with house.running():
        await until(lambda: bool(house.looks))
    assert not house.turns.have_effects()


async def test_nothing_is_looked_at_where_nothing_was_done(house: House) -> None:
    house.backend.do = lambda: False
    house.show(device("x", A))
    async with house.running():
        await until(lambda: house.backend.told == [(A, "x")])
    assert house.looks == []


async def test_resources_that_adopt_nothing_are_left_alone(house: House) -> None:
    house.show(device("x", B), device("y", A))
    async with house.running():
        await until(lambda: house.backend.told == [(A, "y")])


async def test_a_device_is_adopted_anew_when_it_changes_and_not_before(house: House) -> None:
    house.show(device("x", A))
    async with house.running():
        await until(lambda: len(house.looks) == 1)
        house.inventory.touch(A)
        house.show()
        house.show(device("z", A))
        await until(lambda: len(house.looks) == 2)
        house.show(device("x", A, numa_node=1))
        await until(lambda: len(house.looks) == 3)
    assert [key for _, key in house.backend.told] == ["x", "z", "x"]


async def test_what_was_exchanged_while_it_waited_is_not_acted_on(house: House) -> None:
    """What is at that address now may be what the host itself needs."""
    async with house.running():
        async with house.turns.take({"x", "y"}):
            house.show(device("x", A, identity="serial 1"), device("y", A))
            await settled()
            house.show(device("x", B, identity="serial 2"), gone=("y",))
            house.show(device("z", A))
        await until(lambda: house.looks == [(KIND, {"z"})])
        await settled()
    assert house.backend.told == [(A, "z")]


async def test_a_backend_that_cannot_say_whether_it_adopts_is_asked_nothing_more() -> None:
    class Broken(Adopting):
        def adopts(self, resource: Resource[Any]) -> bool:
            raise ZeroDivisionError

    backend = Broken(resource(A))
    with capture_logs() as logs:
        house = House()
        Adopter({KIND: backend}, house.inventory, house.reconciler, house).configure([resource(A)])
    assert [line["event"] for line in logs] == ["backend-failed"]


# --- another configuration ---


async def test_a_resource_that_is_another_now_adopts_what_it_has_once_more_and_others_do_not(house: House) -> None:
    other = "c.example/three"
    reconfigure(house.inventory, [resource(A), resource(other)], {KIND: house.backend})
    house.inventory.ready(KIND)
    house.configure(resource(A), resource(other))
    house.show(device("x", A), device("y", other))
    async with house.running():
        await until(lambda: len(house.backend.told) == 2)
        house.backend.told.clear()
        house.configure(replace(resource(A), spec=replace(resource(A).spec, placement="pack")), resource(other))
        await until(lambda: house.backend.told == [(A, "x")])
        house.configure(resource(other))
        house.configure(resource(other), resource(A))
        await until(lambda: house.backend.told == [(A, "x")] * 2)


async def test_a_resource_that_is_removed_is_tried_no_more(house: House) -> None:
    def fail() -> bool:
        raise NotReady("no driver")

    house.backend.do = fail
    house.show(device("x", A))
    async with house.running():
        await until(lambda: len(house.backend.told) >= 2)
        house.configure(resource(B))
        await settled()
        asked = len(house.backend.told)
        pass_time(60.0)
        await settled()
        assert len(house.backend.told) == asked
        assert house.it.complaints() == {}
