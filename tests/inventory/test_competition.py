from __future__ import annotations

from itertools import permutations

from agent.inventory.competition import Candidate, assign
from agent.model import Held
from backends.base import Device
from tests.fakes import device, held

A, B = "a.example/one", "b.example/two"

Rivals = dict[tuple[str, ...], tuple[Device, tuple[Candidate, ...]]]


def rivals(*devices: Device) -> Rivals:
    """Each device with the resources it is `taken_by`, A before B."""
    return {
        (found.key,): (
            found,
            tuple(
                Candidate(name, (A, B).index(name), found.attributes["ids"]) for name in found.attributes["taken_by"]
            ),
        )
        for found in devices
    }


def place(competing: Rivals, *claims: Held) -> dict[str, str]:
    by_slot = {claim.slot: claim for claim in claims}
    by_hardware = {h: {c.slot for c in claims if h in c.hardware} for claim in claims for h in claim.hardware}
    outcome = assign(competing, by_slot, by_hardware)
    return {ref[0]: placed.resource for ref, placed in outcome.placed.items()}


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
    outcome = assign(rivals(one, two), {claim.slot: claim}, {"two": {claim.slot}})
    joined = {ref: (it.resource, it.ids) for ref, it in outcome.placed.items()}
    assert joined == {("one",): (A, ("x",)), ("two",): (B, ("x",))}
    assert outcome.rejected == {("two",): (f"{A} selects it, but two is held by a pod through {B}",)}
