"""What is explained of a device: whose it is and why not another's, how it is, what a pod would get."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from agent.console.control import NoSuchDeviceError
from agent.console.device_facts import Knowledge, explain, find
from agent.console.views import Decision, Explanation, Gift, Held, Holder, Problem, Signal
from agent.health import Statement
from agent.inventory.inventory import Inventory
from agent.model import Health, State
from backends.base import AllocationRefused, Backend, Clears, ContainerEdits, Device, Grant, Resource, Verdict
from backends.base import Problem as Sentence
from tests.fakes import KIND, Fake, by_unit, device, held, resource

A, B = "a.example/one", "b.example/two"


class Giving(Fake):
    """A backend that hands out what a test says."""

    given: Callable[[], Any] = ContainerEdits

    def edits(self, resource: Resource[Any], grants: Sequence[Grant]) -> ContainerEdits:
        edits: ContainerEdits = self.given()
        return edits


class World:
    """An inventory, and what else is known."""

    def __init__(self, *devices: Device, names: Sequence[str] = (A, B), others: Mapping[str, Sequence[Device]] = {}):
        self.backend = Giving(*map(resource, names))
        other = Giving(*(resource(name, kind) for kind in others for name in ("c.example/three",)))
        resources = [*self.backend.resources, *other.resources]
        backends: dict[str, Backend[Any]] = {KIND: self.backend, **dict.fromkeys(others, other)}
        self.inventory = Inventory(resources, backends)
        self.inventory.update(KIND, by_unit(devices))
        for kind, found in others.items():
            self.inventory.update(kind, by_unit(found))
        self.said: dict[str, tuple[Statement, ...]] = {}
        self.known = Knowledge(
            self.inventory,
            backends,
            lambda hardware: self.said.get(hardware, ()),
            lambda kind, unit: (Sentence(unit, f"{unit} of {kind} is odd"),),
            lambda monotonic: monotonic + 1000.0,
            lambda slot: (Holder("team", f"pod-of-{slot[1]}", "main"),),
            {(A, "ready"): "its driver is gone"},
            lambda: self.beside,
        )
        self.beside: list[tuple[str, Device]] = []

    def explain(self, name: str) -> Explanation:
        it = explain(self.known, asyncio.run(find(self.known, name)), name)
        assert it is not None
        return it


def decided(it: Explanation) -> Iterable[tuple[str, bool, str]]:
    return [(one.resource, one.taken, one.why) for one in it.decisions]


def test_what_takes_it_and_what_does_not_is_said_of_every_resource() -> None:
    it = World(device("d", A), device("e", B)).explain("d")
    assert (it.key, it.backend, it.unit, it.resource, it.ids, it.state) == ("d", KIND, "d", A, ("d",), "Healthy")
    assert it.decisions == (
        Decision(B, False, f"does not take it: taken_by is {A}, not {B}"),
        Decision(A, True, "takes it"),
    )


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("", f"{A} is a resource, and it has no device; `fairlead doctor` says why"),
        ("ab", f"{A} is a resource; name one of its devices: a, b"),
        ("abcdefghij", f"{A} is a resource; name one of its devices: a, b, c, d, e, f, g, h and 2 more"),
    ],
)
def test_who_names_a_resource_is_told_its_devices(names: str, said: str) -> None:
    with pytest.raises(NoSuchDeviceError) as caught:
        World(*(device(name, A) for name in names)).explain(A)
    assert str(caught.value) == said


def test_a_resource_that_comes_too_late_is_told_who_came_before() -> None:
    assert (B, False, f"selects it, but {A} comes before it in the configuration and has it") in decided(
        World(device("d", A, B)).explain("d")
    )


def test_a_device_that_lost_its_hardware_is_not_offered_and_says_to_whom() -> None:
    it = World(device("d", A, hardware=["x"]), device("e", B, hardware=["x"])).explain("e")
    assert (it.key, it.resource, it.gift, it.ids) == ("e", "", None, ())
    assert (B, False, f"selects it, but x belongs to {A}") in decided(it)


def test_hardware_is_the_device_that_is_offered_and_the_others_on_it_are_told_too() -> None:
    unbound = device("group", "c.example/three", hardware=["pci:1", "pci:2"], unusable="it has no driver")
    it = World(device("gpu", A, hardware=["pci:1"]), others={"other": [unbound]}).explain("1")
    assert it.key == "gpu"
    assert ("", False, "it has no driver; that is about group of the backend other") in decided(it)


@pytest.mark.parametrize("name", ["0000:3b:00.0", "pci:0000:3b:00.0", "3b:00.0", "hfi1"])
def test_what_no_resource_selects_is_explained_although_it_is_shown_nowhere(name: str) -> None:
    world = World(device("d", A), others={"other": ()})
    unselected = device("0000:3b:00.0", "x.example/y", hardware=["pci:0000:3b:00.0"], numa_node=1)
    world.beside = [
        (KIND, device("e", "x.example/y")),
        (KIND, replace(unselected, attributes={**unselected.attributes, "hca": ("hfi1",)})),
    ]
    it = world.explain(name)
    assert (it.key, it.resource, it.hardware, it.gift, it.ids) == ("0000:3b:00.0", "", ("pci:0000:3b:00.0",), None, ())
    assert it.numa_node == 1
    assert decided(it) == [
        (A, False, f"does not take it: taken_by is x.example/y, not {A}"),
        (B, False, f"does not take it: taken_by is x.example/y, not {B}"),
    ]
    with pytest.raises(NoSuchDeviceError, match="there is no device 'f'"):
        world.explain("f")


def test_an_id_is_its_device_also_with_the_resource_before_it() -> None:
    world = World(device("d", A, ids=["d::0", "d::1"]))
    assert world.explain("d::1").key == world.explain(f"{A}/d::0").key == "d"


def test_hardware_that_others_only_depend_on_is_explained_by_them() -> None:
    it = World(device("part", A, hardware=["mig:1"], depends=["pci:1"])).explain("pci:1")
    assert (it.key, it.resource) == ("pci:1", "")
    assert decided(it) == [(A, True, "part depends on it")]


def test_what_is_gone_and_held_is_explained_by_its_claim() -> None:
    world = World(device("d", A))
    world.inventory.claim([held(A, "d", device("d", A))])
    world.inventory.update(KIND, {"d": ()})
    it = world.explain("d")
    assert (it.key, it.resource, it.state, it.reason, it.since) == ("d", A, "Unhealthy", "gone", 0.0)
    assert it.held == (Held("d", (Holder("team", "pod-of-d", "main"),)),)
    assert "cannot be used now: the device is gone" in it.refusal


def test_a_state_is_explained_with_its_date_on_the_wall_clock() -> None:
    world = World(device("d", A))
    world.inventory.set_health({"d": Health(State.UNHEALTHY, "sick", "It is sick.", 7.0)})
    assert world.explain("d").since == 1007.0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gup-1", "did you mean 'gpu-1'"),
        ("gpu-7", "there is gpu-1$"),
        ("zzz", "there are 'gpu-1', 'nic'"),
        ("twin", "may be x of .* or y of"),
    ],
)
def test_a_name_that_nothing_has_or_several_have_is_answered_with_names(name: str, sentence: str) -> None:
    world = World(
        device("gpu-1", A), device("nic", A),
        device("twin", A, hardware=["x"], unit="1", ids=["t1"]), device("twin", B, hardware=["y"], unit="2", ids=["t2"]),
    )  # fmt: skip
    with pytest.raises(NoSuchDeviceError, match=sentence):
        world.explain(name)


def test_everything_that_is_said_of_it_is_shown_also_what_does_not_count() -> None:
    world = World(device("d", A, depends=["parent"]))
    world.said = {
        "d": (Statement("probe", Verdict.DELAYED, "port-down", "It is down.", 5.0, counts=False, changes=35.0),),
        "parent": (
            Statement("record", Verdict.NOW, "xid-79", "It fell.", 6.0, counts=True,
                      waits_for=frozenset({Clears.REBIND, Clears.BOOT})),
        ),
    }  # fmt: skip
    assert world.explain("d").signals == (
        Signal("d", "port-down", "delayed", "It is down.", 1005.0, False, (), "probe", 1035.0),
        Signal("parent", "xid-79", "now", "It fell.", 1006.0, True, ("boot", "rebind"), "record"),
    )


def test_problems_of_its_unit_and_why_it_could_not_be_made_ready_are_shown() -> None:
    assert World(device("ready", A)).explain("ready").problems == (
        Problem(KIND, "ready", f"ready of {KIND} is odd"),
        Problem(KIND, "ready", "it could not be made ready: its driver is gone"),
    )


def test_an_unhealthy_device_shows_what_a_pod_would_get_and_why_it_would_not() -> None:
    world = World(device("d", A))
    world.backend.given = lambda: ContainerEdits(env={"X": "1"})
    world.inventory.set_health({"d": Health(State.UNHEALTHY, "hot", "It burns.")})
    it = world.explain("d")
    assert it.gift == Gift({"X": "1"})
    assert it.refusal == f"Device d of {A} cannot be used now: It burns."


def raising(error: Exception) -> Callable[[], Any]:
    def give() -> None:
        raise error

    return give


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (raising(AllocationRefused("not together")), "not together"),
        (raising(ValueError("oh no")), "the backend fake failed: ValueError('oh no')"),
        (lambda: None, "the backend fake failed"),
    ],
)
def test_a_backend_that_gives_nothing_is_a_refusal(given: Callable[[], Any], sentence: str) -> None:
    world = World(device("d", A))
    world.backend.given = given
    it = world.explain("d")
    assert it.gift is None
    assert sentence in it.refusal


def test_what_is_unusable_and_held_is_explained_as_it_is_listed() -> None:
    """As a GPU whose node is gone."""
    world = World(device("d", A))
    world.inventory.claim([held(A, "d", device("d", A))])
    world.inventory.update(KIND, by_unit([replace(device("d", A), unusable="/dev/d is missing")]))
    it = world.explain("d")
    assert (it.resource, it.ids, it.state, it.reason) == (A, ("d",), "Unhealthy", "unusable")
    assert it.held == (Held("d", (Holder("team", "pod-of-d", "main"),)),)
    assert "cannot be used now: /dev/d is missing" in it.refusal
