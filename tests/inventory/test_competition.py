from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from agent.inventory.ownership import Holdings, assign
from agent.inventory.selection import Candidate, Found
from agent.model import Held
from backends.base import Device
from tests.fakes import KIND, device, held

A, B = "a.example/one", "b.example/two"


def rivals(*devices: Device) -> list[Found]:
    """Each device with the resources it is `taken_by`, A before B."""
    return [
        Found(
            KIND,
            device.unit,
            device,
            tuple(Candidate(it, (A, B).index(it), device.attributes["ids"]) for it in device.attributes["taken_by"]),
            (),
        )
        for device in devices
    ]


def place(competing: Sequence[Found], *claims: Held) -> dict[str, str]:
    return {it.device.key: at.resource for it, at in assign(competing, Holdings(claims)).placed.items()}


def test_the_first_resource_by_order_wins() -> None:
    assert place(rivals(device("d", A, B))) == {"d": A}


def test_hardware_of_another_resource_is_an_obstacle_and_of_ones_own_is_none() -> None:
    one, two, three = (device(k, r, hardware=["h"]) for k, r in (("one", A), ("two", A), ("three", B)))
    assert place(rivals(one, two, three)) == {"one": A, "two": A}


def test_who_is_refused_by_one_resource_may_join_the_next() -> None:
    one, two = device("one", A, ids=["x"]), device("two", A, B, ids=["x"])
    assert place(rivals(one, two)) == {"one": A, "two": B}


def test_claimed_hardware_belongs_to_the_pods_resource_even_if_that_does_not_select_it() -> None:
    assert place(rivals(device("d", A)), held(B, "gone", device("d"))) == {}


def test_a_claim_of_a_part_keeps_the_whole() -> None:
    whole, other = device("whole", B, hardware=["h1", "h2"]), device("other", A, hardware=["h2"])
    claim = held(B, "whole", device("part", hardware=["h1"]))
    assert place(rivals(whole, other), claim) == {"whole": B}


def test_the_outcome_does_not_depend_on_the_order_of_the_rivals() -> None:
    devices = [
        device("one", A, hardware=["h"]),
        device("two", A, B, hardware=["h", "g"]),
        device("three", B, ids=["one"]),
    ]
    outcomes = [place(rivals(*order), held(B, "two", devices[1])) for order in permutations(devices)]
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_every_refusal_of_a_resource_that_selects_it_is_kept() -> None:
    one, two = device("one", A, B, ids=["x"], hardware=["h"]), device("two", A, B, ids=["x"])
    claim = held(B, "y", device("y", hardware=["two"]))
    first, second = competing = rivals(one, two)
    outcome = assign(competing, Holdings([claim]))
    assert {it: (at.resource, at.ids) for it, at in outcome.placed.items()} == {first: (A, ("x",)), second: (B, ("x",))}
    assert outcome.rejected == {second: (f"{A} selects it, but two is held by a pod through {B}",)}
