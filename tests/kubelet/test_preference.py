from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import force_setattr
from structlog.testing import capture_logs

from agent.inventory.inventory import Inventory
from agent.kubelet import allocation
from agent.kubelet.allocation import Preferences, plain
from agent.kubelet.wire import PreferredRequest
from agent.model import Health, State
from agent.placement.choice import choose
from backends.base import Backend, Link, Resource
from tests.fakes import KIND, Fake, by_unit, device, held, reconfigure, resource

A, B = "a.example/one", "b.example/two"
IDS = ("a", "b", "c", "d")


class Choosy(Fake):
    """Says what a test tells it to `prefers`."""

    def __init__(self, *resources: Resource[Any]) -> None:
        super().__init__(*resources)
        self.answer: Callable[[], Any] = lambda: True

    def prefers(self, resource: Resource[Any]) -> bool:
        answer: bool = self.answer()
        return answer


def preferences(backend: Fake) -> tuple[Inventory, Preferences]:
    """Four devices, of which the second and the fourth are linked."""
    inventory = Inventory([resource(A)], {KIND: backend})
    inventory.update(KIND, by_unit(device(key, A, numa_node=0) for key in IDS), {"b": (Link("b", "d", 1),)})
    return inventory, Preferences(inventory, {KIND: backend})


def wish(size: int, available: Sequence[str] = IDS, must: Sequence[str] = ()) -> PreferredRequest:
    return PreferredRequest(tuple(available), tuple(must), size)


async def test_it_chooses_by_what_the_inventory_knows_now() -> None:
    inventory, it = preferences(Choosy())
    prefer = it.of(A)
    assert prefer is not None
    assert await prefer(wish(2)) == ("b", "d")
    inventory.set_health({"d": Health(State.UNHEALTHY, "sick", "It is sick.")})
    assert await prefer(wish(2)) == ("a", "b")
    assert await prefer(wish(3, must=["d"])) == ("d", "a", "b")
    inventory.update(KIND, {"b": ()}, {"b": ()})
    assert await prefer(wish(2)) == ("a", "c")


async def test_the_resources_placement_counts() -> None:
    shared = resource(A)
    backend = Choosy()
    for placement, expected in (("spread", ("x::1", "y::0")), ("pack", ("x::1", "x::2"))):
        force_setattr(shared.spec, "placement", placement)
        inventory = Inventory([shared], {KIND: backend})
        ids = {"x": ["x::0", "x::1", "x::2"], "y": ["y::0", "y::1", "y::2"]}
        inventory.update(KIND, by_unit(device(key, A, ids=of) for key, of in ids.items()))
        prefer = Preferences(inventory, {KIND: backend}).of(A)
        assert prefer is not None
        assert await prefer(wish(2, ["x::2", "y::0", "x::1", "y::1", "y::2"])) == expected


def test_a_resource_that_does_not_care_has_no_preference() -> None:
    backend = Choosy()
    backend.answer = lambda: False
    assert preferences(backend)[1].of(A) is None
    assert preferences(backend)[1].of("retired.example/x") is None


def test_sharing_devices_makes_a_preference_by_default() -> None:
    alone, shared = resource(A), resource(A, replicas=2)
    assert Fake(alone).prefers(alone) is False
    assert Fake(shared).prefers(shared) is True


def test_a_backend_that_fails_to_say_whether_it_cares_has_no_preference() -> None:
    backend = Choosy()
    backend.answer = lambda: 1 / 0
    with capture_logs() as logs:
        assert preferences(backend)[1].of(A) is None
    assert [(entry["event"], entry["call"]) for entry in logs] == [("backend-failed", "prefers")]


async def test_a_failure_is_logged_and_gives_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    _, it = preferences(Choosy())
    prefer = it.of(A)
    assert prefer is not None

    def bad(slots: Any, *arguments: Any) -> Any:
        return 1 / 0 if slots else choose(slots, *arguments)

    monkeypatch.setattr(allocation, "choose", bad)
    with capture_logs() as logs:
        assert await prefer(wish(2, must=["c"])) == ("c", "a")
    assert [entry["event"] for entry in logs] == ["placement-failed"]


async def test_it_chooses_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    _, it = preferences(Choosy())
    prefer = it.of(A)
    monkeypatch.setattr(allocation, "choose", lambda *_: (threading.current_thread().name,))
    assert prefer is not None
    assert await prefer(wish(1)) != (threading.main_thread().name,)


async def test_a_resource_that_retires_meanwhile_gives_the_first_ones() -> None:
    inventory, it = preferences(Choosy())
    prefer = it.of(A)
    reconfigure(inventory, (), {})
    assert prefer is not None
    assert await prefer(wish(2)) == ("a", "b")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (wish(2, ["c", "a", "b"], ["b"]), ("b", "a")),
        (wish(9), IDS),
        (wish(0), ()),
        (wish(-4), ()),
        (wish(1, (), ["z", "z"]), ("z",)),
    ],
)
def test_the_plain_choice_is_what_must_be_and_the_first_ones(
    request_: PreferredRequest, expected: tuple[str, ...]
) -> None:
    assert plain(request_) == expected


class Adapters(Choosy):
    """Adapters, which a container asks for with GPUs."""

    company = frozenset({"cards"})


@pytest.mark.parametrize(
    ("taken", "size", "expected"), [((), 1, {"n1"}), (("g1",), 1, {"n2"}), (("g1",), 2, {"n2", "n3"})]
)
async def test_adapters_asked_for_before_the_gpus_are_those_beside_gpus_that_are_free(
    taken: Sequence[str], size: int, expected: set[str]
) -> None:
    gpus, adapters = resource(B, "cards"), resource(A)
    backends: dict[str, Backend[Any]] = {KIND: Adapters(adapters), "cards": Choosy(gpus)}
    inventory = Inventory([adapters, gpus], backends)
    below = [("pci0", f"port{number}", "up", f"down{number}") for number in range(4)]
    inventory.update(KIND, by_unit(device(f"n{n}", A, ancestry=below[n]) for n in range(4)))
    inventory.update("cards", by_unit(device(f"g{n}", B, ancestry=below[n]) for n in (1, 2, 3)))
    inventory.set_health({"g3": Health(State.UNHEALTHY, "xid", "It is sick.")} if size == 1 else {})
    inventory.claim([held(B, key) for key in taken])
    prefer = Preferences(inventory, backends).of(A)
    assert prefer is not None
    assert set(await prefer(wish(size, ("n0", "n1", "n2", "n3")))) == expected
