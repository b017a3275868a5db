from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from agent.inventory.inventory import Inventory
from agent.model import FORGOTTEN, HEALTHY, TWO_PODS, Health, Held, Slot, State
from agent.runtime import limits
from backends.base import Device, Link
from tests import fakes
from tests.fakes import KIND, Fake, by_unit, device, held, reconfigure, resource, shown

A, B = "a.example/one", "b.example/two"
SICK = Health(State.UNHEALTHY, "sick", "It is sick.")
WEAK = Health(State.DEGRADED, "weak", "It is weak.")


def inventory(*names: str, devices: Sequence[Device] = ()) -> Inventory:
    return fakes.inventory(*map(resource, names or (A, B)), devices=devices)


# --- links ---


def test_links_are_kept_by_the_unit_that_told_them() -> None:
    it = inventory()
    assert it.links(KIND) == []
    one, other, third = Link("a", "b", 1), Link("b", "c", 2), Link("a", "c", 3)
    it.update(KIND, {}, {"u": (one, other), "v": (third,)})
    assert it.links(KIND) == [one, other, third]
    it.update(KIND, {"u": ()}, {"u": ()})
    it.update(KIND, {"v": ()})
    assert it.links(KIND) == [third]
    assert it.links("other") == []


# --- who gets what ---


def test_a_device_joins_the_first_resource_that_selects_it() -> None:
    it = inventory(devices=[device("d", A, B)])
    assert shown(it, A) == {"d": "Healthy"}
    assert shown(it, B) == {}


def test_a_device_that_nobody_selects_keeps_every_reason() -> None:
    it = inventory(devices=[device("d", "somebody.else/x")])
    (lost,) = it.unclaimed()
    assert lost.device.key == "d"
    assert lost.why == (
        f"{A} does not take it: taken_by is somebody.else/x, not {A}; "
        f"{B} does not take it: taken_by is somebody.else/x, not {B}"
    )


def test_a_device_that_was_made_for_one_resource_has_the_reasons_of_that_one_alone() -> None:
    theirs, lost = device("one", A, hardware=["h"]), replace(device("two", B, hardware=["h"]), resource=B)
    it = inventory(devices=[theirs, lost, replace(device("three", A), resource="nobody.knows/it")])
    assert {left.device.key: left.why for left in it.unclaimed()} == {
        "two": f"{B} selects it, but h belongs to {A}",
        "three": "it was made for nobody.knows/it, which is not configured for its backend",
    }


def test_devices_that_share_hardware_may_be_in_one_resource_and_never_in_two() -> None:
    one = device("one", A, hardware=["shared", "1"])
    two = device("two", A, hardware=["shared", "2"])
    three = device("three", B, hardware=["shared", "3"])
    it = inventory(devices=[three, two, one])
    assert shown(it, A) == {"one": "Healthy", "two": "Healthy"}
    assert shown(it, B) == {}
    assert [lost.why.split("; ")[0] for lost in it.unclaimed()] == [f"{B} selects it, but shared belongs to {A}"]


def test_of_two_devices_with_one_id_the_first_by_name_is_listed_whoever_came_first() -> None:
    one, two = device("one", A, ids=["same"]), device("two", A, ids=["same"])
    for order in ([one, two], [two, one]):
        it = inventory()
        for found in order:
            it.update(KIND, by_unit([found]))
        assert it.slots(A)["same"].device == one
        assert it.unclaimed()[0].why.startswith(f"{A} selects it, but its ID same is that of one")


def test_the_next_in_line_takes_over_what_another_leaves() -> None:
    it = inventory(devices=[device("one", A, hardware=["h"]), device("two", B, hardware=["h"])])
    assert shown(it, B) == {}
    it.update(KIND, {"one": ()})
    assert shown(it, A) == {}
    assert shown(it, B) == {"two": "Healthy"}


def test_what_a_pod_holds_does_not_change_hands_when_a_resource_with_precedence_would_take_it() -> None:
    found = device("d", A, B)
    it = inventory()
    it.claim([held(B, "d", found)])
    it.update(KIND, by_unit([found]))
    assert shown(it, A) == {}
    assert shown(it, B) == {"d": "Healthy"}
    it.unclaim([held(B, "d", found)])
    assert shown(it, A) == {"d": "Healthy"}
    assert shown(it, B) == {}


def test_a_claim_whose_hardware_only_the_kubelet_knew_draws_the_device_with_its_id() -> None:
    found = device("d", A, B)
    early, late = inventory(), inventory(devices=[found])
    early.claim([held(B, "d")])
    early.update(KIND, by_unit([found]))
    late.claim([held(B, "d")])
    for it in (early, late):
        assert shown(it, A) == {}
        assert shown(it, B) == {"d": "Healthy"}
    late.unclaim([held(B, "d")])
    assert shown(late, A) == {"d": "Healthy"}


def test_an_id_that_is_claimed_goes_to_the_hardware_that_the_pod_has() -> None:
    one, two = device("one", A, ids=["same"]), device("two", A, ids=["same"])
    it = inventory(devices=[one, two])
    it.claim([held(A, "same", two)])
    assert it.slots(A)["same"].device == two


def test_a_claim_that_changes_its_hardware_frees_what_it_had() -> None:
    one, two = device("one", A, B), device("two", A)
    it = inventory(devices=[two])
    it.claim([held(B, "x", one)])
    it.update(KIND, by_unit([one]))
    assert shown(it, A) == {"two": "Healthy"}
    it.claim([Held(B, "x", KIND, frozenset({"elsewhere"}))])
    assert shown(it, A) == {"two": "Healthy", "one": "Healthy"}


def test_what_an_allocate_gives_stays_with_its_device_where_another_has_the_id_and_some_of_the_hardware() -> None:
    """Once found by the test of any order below: the two overlap in hardware and IDs, and a claim had decided."""
    given_out = device("k1", B, unit="u1", hardware=["h3"], ids=["i3", "i0"])
    other = device("k0", B, unit="u1", hardware=["h2", "h3"], ids=["i3"])
    hint, given = held(B, "i0"), held(B, "i3", given_out)
    it, fresh = inventory(), inventory()
    it.claim([hint])
    it.update(KIND, by_unit([given_out, other]))
    assert it.slots(B)["i3"].device == given_out
    it.claim([given])
    it.unclaim([hint])
    fresh.claim([given])
    fresh.update(KIND, by_unit([other, given_out]))
    assert it.slots(B) == fresh.slots(B)
    assert it.slots(B)["i3"].device == given_out


def test_of_two_devices_with_the_hardware_and_the_id_that_a_pod_has_the_one_that_more_pods_hold_is_listed() -> None:
    one, two = device("one", B, hardware=["h"], ids=["i"]), device("two", B, hardware=["h"], ids=["i", "j"])
    claims = [held(B, "j"), held(B, "i", two)]
    it, fresh = inventory(), inventory()
    it.claim(claims[:1])
    it.update(KIND, by_unit([one, two]))
    it.claim(claims[1:])
    fresh.update(KIND, by_unit([two, one]))
    fresh.claim(reversed(claims))
    assert it.slots(B) == fresh.slots(B)
    assert [slot.device for slot in it.slots(B).values() if slot.device != two] == []


# --- what a pod holds stays listed ---


def test_a_claimed_id_whose_device_vanishes_stays_as_an_unhealthy_tombstone_until_the_claim_ends() -> None:
    found = device("d", A)
    it = inventory(devices=[found])
    it.claim([held(A, "d", found)])
    it.update(KIND, {"d": ()})
    assert it.slots(A)["d"] == Slot("d", None, it.slots(A)["d"].health)
    assert shown(it, A) == {"d": "gone"}
    it.update(KIND, by_unit([found]))
    assert shown(it, A) == {"d": "Healthy"}
    it.update(KIND, {"d": ()})
    it.unclaim([held(A, "d", found)])
    assert shown(it, A) == {}


def since(it: Inventory, now: float, resource: str = A) -> dict[str, tuple[str, float]]:
    """How the list is that is taken now, and since when."""
    (snapshot,) = [snapshot for snapshot in it.take(now) if snapshot.resource == resource]
    assert dict(snapshot.slots) == dict(it.slots(resource))
    return {slot.id: (slot.health.reason, slot.health.since) for slot in snapshot.slots.values()}


def test_a_tombstone_is_dated_from_when_its_device_was_seen_to_go() -> None:
    found, lame = device("d", A), device("d", A, unusable="it has no driver")
    it = inventory(devices=[found])
    it.ready(KIND)
    it.claim([held(A, "d", found)])
    it.set_health({"d": Health(State.UNHEALTHY, "off-bus", "It fell off.", 5.0)})
    assert since(it, 10.0) == {"d": ("off-bus", 5.0)}
    it.update(KIND, {"d": ()})
    assert since(it, 20.0) == {"d": ("gone", 20.0)}
    it.touch(A)
    it.update(KIND, {"d": (lame,)})
    it.update(KIND, {"d": ()})
    assert since(it, 30.0) == {"d": ("gone", 20.0)}, "in no time it was back and gone again"
    it.update(KIND, {"d": (lame,)})
    assert since(it, 40.0) == {"d": ("unusable", 40.0)}
    it.update(KIND, {"d": ()})
    assert since(it, 50.0) == {"d": ("gone", 50.0)}
    reconfigure(it, [], {})
    assert since(it, 60.0) == {"d": ("retired", 60.0)}


def test_what_has_been_told_already_is_not_told_again_for_its_date() -> None:
    it = inventory(devices=[found := device("d", A)])
    it.ready(KIND)
    it.claim([held(A, "d", found)])
    it.take(10.0)
    it.update(KIND, {"d": ()})
    it.take(20.0)
    it.claim([replace(held(A, "d", found), identity="now it is known")])
    assert it.take(30.0) == []


def test_what_was_gone_when_we_came_is_not_dated_nobody_saw_it_go() -> None:
    it = inventory()
    it.ready(KIND)
    it.claim([held(A, "d", device("d", A))])
    assert since(it, 10.0) == {"d": ("gone", 0.0)}
    it.touch(A)
    assert since(it, 20.0) == {"d": ("gone", 0.0)}
    it.update(KIND, by_unit([device("d", A)]))
    it.take(30.0)
    it.update(KIND, {"d": ()})
    assert since(it, 40.0) == {"d": ("gone", 40.0)}


def test_a_claim_on_what_is_not_there_is_not_dated_although_others_are_listed() -> None:
    it = inventory(devices=[device("d", A)])
    it.ready(KIND)
    it.take(10.0)
    it.claim([held(A, "e", device("e", A))])
    assert since(it, 20.0)["e"] == ("gone", 0.0)


def test_what_a_pod_was_given_is_replaced_since_the_other_was_seen_and_all_ids_are_alike() -> None:
    first, second = (device("d", A, identity=i, ids=["d::0", "d::1", "d::2"]) for i in ("1", "2"))
    it = inventory(devices=[first])
    it.ready(KIND)
    it.claim([held(A, "d::1", first), held(A, "d::2", first)])
    it.take(10.0)
    it.update(KIND, by_unit([second]))
    assert since(it, 20.0) == {"d::0": ("", 0.0), "d::1": ("replaced", 20.0), "d::2": ("replaced", 20.0)}
    assert it.slots(A)["d::1"].health is it.slots(A)["d::2"].health
    it.update(KIND, by_unit([replace(second, numa_node=1)]))
    assert since(it, 30.0)["d::1"] == ("replaced", 20.0)


def test_a_device_that_cannot_be_used_as_it_is_joins_nothing_and_says_why() -> None:
    it = inventory(devices=[device("d", A, unusable="it has no driver")])
    assert shown(it, A) == {}
    assert [(left.device.key, left.why) for left in it.unclaimed()] == [("d", "it has no driver")]


def test_a_pod_that_holds_hardware_which_became_unusable_is_told_why_and_gets_it_back() -> None:
    found, lame = device("GPU-1", A, unit="u", hardware=["h"]), device("0000:3b:00.0", A, unit="u", hardware=["h"])
    lame = replace(lame, unusable="it has no driver")
    it = inventory(devices=[found])
    it.claim([held(A, "GPU-1", found)])
    it.update(KIND, {"u": (lame,)})
    assert it.slots(A)["GPU-1"].health.message == "it has no driver; a pod still holds it"
    it.update(KIND, {"u": ()})
    assert shown(it, A) == {"GPU-1": "gone"}
    it.update(KIND, {"u": (lame,)})
    assert shown(it, A) == {"GPU-1": "unusable"}
    it.update(KIND, {"u": (found,)})
    assert shown(it, A) == {"GPU-1": "Healthy"}


def test_another_card_at_the_same_address_is_unhealthy_until_the_pod_lets_go() -> None:
    first, second = device("d", A, identity="serial 1"), device("d", A, identity="serial 2")
    it = inventory(devices=[first])
    it.claim([held(A, "d", first)])
    it.update(KIND, by_unit([second]))
    assert shown(it, A) == {"d": "replaced"}
    assert it.slots(A)["d"].health.message == "it is serial 2 now; the pod that holds it was given serial 1"
    it.unclaim([held(A, "d", first)])
    assert shown(it, A) == {"d": "Healthy"}


def test_other_hardware_under_the_claimed_id_is_not_what_the_pod_was_given() -> None:
    it = inventory(devices=[device("d", A, hardware=["slot 2"])])
    it.claim([Held(A, "d", KIND, frozenset({"slot 1"}))])
    assert shown(it, A) == {"d": "replaced"}
    assert it.slots(A)["d"].health.message == "it is slot 2 now; the pod that holds it was given slot 1"


def test_a_card_whose_identity_cannot_be_told_now_is_taken_for_the_one_that_was_there() -> None:
    known, unknown = device("d", A, identity="guid 1"), device("d", A)
    it = inventory(devices=[known])
    it.claim([held(A, "d", known)])
    it.update(KIND, by_unit([unknown]))
    assert shown(it, A) == {"d": "Healthy"}


def test_only_the_tokens_that_a_pod_holds_of_a_replaced_card_are_unhealthy() -> None:
    first, second = (device("d", A, identity=i, ids=["d::0", "d::1"]) for i in ("1", "2"))
    it = inventory(devices=[first])
    it.claim([held(A, "d::1", first)])
    it.update(KIND, by_unit([second]))
    assert shown(it, A) == {"d::0": "Healthy", "d::1": "replaced"}


def test_a_resource_that_is_no_longer_configured_is_listed_unhealthy_until_its_claims_end() -> None:
    it = inventory(A)
    gone = held("old.example/x", "d", device("d", A))
    it.claim([gone])
    it.update(KIND, by_unit([device("d", A)]))
    assert it.names() == [A, "old.example/x"]
    assert shown(it, A) == {}
    assert shown(it, "old.example/x") == {"d": "retired"}
    it.take()
    it.unclaim([gone])
    assert [(s.resource, dict(s.slots)) for s in it.take() if s.resource != A] == [("old.example/x", {})]
    assert it.names() == [A]
    assert shown(it, A) == {"d": "Healthy"}
    assert it.omitted("old.example/x") == 0  # asked of every snapshot taken, this last one too
    it.touch("old.example/x")


# --- health ---


def test_a_slot_is_as_well_as_the_worst_of_its_hardware_and_of_what_it_depends_on() -> None:
    it = inventory(devices=[device("d", A, depends=["parent"])])
    it.set_health({"parent": WEAK})
    assert shown(it, A) == {"d": "weak"}
    it.set_health({"d": SICK})
    assert shown(it, A) == {"d": "sick"}
    it.set_health({"d": HEALTHY})
    assert shown(it, A) == {"d": "weak"}
    it.set_health({"parent": HEALTHY})
    assert it.slots(A)["d"].health is HEALTHY


def test_health_known_before_the_device_counts_when_it_appears() -> None:
    it = inventory()
    it.set_health({"d": SICK})
    it.update(KIND, by_unit([device("d", A)]))
    assert shown(it, A) == {"d": "sick"}


MOVED = Health(State.UNHEALTHY, "moved", "It is in a pod's namespace.", while_held=HEALTHY)
MOVED_AND_WEAK = replace(MOVED, while_held=WEAK)


def test_all_slots_on_hardware_that_fails_change_together() -> None:
    shared = device("d", A, hardware=["pci:1", "pci:2"], ids=[f"d::{n}" for n in range(4)])
    other = device("other", A, ids=["other::0"])
    it = inventory(devices=[shared, other])
    it.take()
    it.claim([held(A, "d::1", shared)])
    it.take()
    it.set_health({"pci:2": SICK})
    (snapshot,) = it.take()
    assert snapshot.changed == frozenset(f"d::{n}" for n in range(4))
    assert [slot.id for slot in snapshot.slots.values() if slot.health.reason == "sick"] == [
        f"d::{n}" for n in range(4)
    ]


def test_what_does_not_count_while_held_counts_again_for_every_slot_when_the_claim_ends() -> None:
    shared = device("d", A, hardware=["h"], ids=["d::0", "d::1"])
    child = device("child", B, depends=["h"])
    it = inventory(devices=[shared, child])
    claim = held(A, "d::0", shared)
    it.claim([claim])
    it.take()
    it.set_health({"h": MOVED})
    assert it.take() == []
    assert (shown(it, A), shown(it, B)) == ({"d::0": "Healthy", "d::1": "Healthy"}, {"child": "Healthy"})
    it.unclaim([claim])
    assert len(it.take()) == 2
    assert (shown(it, A), shown(it, B)) == ({"d::0": "moved", "d::1": "moved"}, {"child": "moved"})
    it.claim([claim])
    assert (shown(it, A), shown(it, B)) == ({"d::0": "Healthy", "d::1": "Healthy"}, {"child": "Healthy"})


def test_a_claim_that_turns_out_to_hold_other_hardware_frees_the_first() -> None:
    it = inventory(devices=[device("d", A, hardware=["h"])])
    it.claim([Held(A, "other", KIND, frozenset({"h"}))])
    it.set_health({"h": MOVED_AND_WEAK})
    assert shown(it, A) == {"d": "held", "other": "weak"}
    it.claim([Held(A, "other", KIND, frozenset({"g"}))])
    assert shown(it, A) == {"d": "moved", "other": "gone"}


def test_held_hardware_with_another_complaint_shows_that() -> None:
    found = device("d", A, hardware=["g", "h"])
    it = inventory(devices=[found])
    it.claim([held(A, "d", found)])
    it.set_health({"g": MOVED, "h": WEAK})
    assert shown(it, A) == {"d": "weak"}
    it.set_health({"g": MOVED_AND_WEAK, "h": SICK})
    assert shown(it, A) == {"d": "sick"}


# --- snapshots ---


def test_nothing_is_handed_out_before_the_backend_is_ready_and_then_even_an_empty_list() -> None:
    it = Inventory([resource(A)], {KIND: Fake()})
    assert it.take() == []
    it.ready(KIND)
    (snapshot,) = it.take()
    assert (snapshot.resource, dict(snapshot.slots)) == (A, {})
    assert it.take() == []


def test_a_retired_resource_waits_for_no_backend() -> None:
    it = Inventory([resource(A)], {KIND: Fake()})
    it.claim([held("old.example/x", "d")])
    assert [s.resource for s in it.take()] == ["old.example/x"]


def test_a_touched_list_is_taken_again_with_nothing_changed() -> None:
    it = inventory(A, devices=[device("d", A)])
    (first,) = it.take()
    it.touch(A)
    (second,) = it.take()
    assert (second.generation, second.changed) == (first.generation + 1, frozenset())
    assert second.slots == first.slots


def test_a_look_that_finds_the_same_and_an_allocate_of_what_is_listed_change_no_list() -> None:
    it = inventory(devices=[found := device("d", A)])
    it.take()
    it.update(KIND, by_unit([device("d", A)]))
    it.claim([held(A, "d", found)])
    assert it.take() == []


# --- what backends may answer ---


@pytest.mark.parametrize("ids", [None, [""], [7], ["not text: \udcff"], [["list"]]])
def test_nonsense_instead_of_ids_refuses_that_device_alone(ids: Any) -> None:
    class Odd(Fake):
        def ids(self, resource: Any, device: Device) -> Any:
            return ids if device.key == "odd" else super().ids(resource, device)

    it = Inventory([resource(A)], {KIND: Odd()})
    it.update(KIND, by_unit([device("odd", A), device("well", A)]))
    assert shown(it, A) == {"well": "Healthy"}
    assert it.unclaimed()[0].why.startswith(f"{A} does not take it: its IDs cannot be told: ")


def test_an_id_said_twice_is_listed_once() -> None:
    it = inventory(A, devices=[device("d", A, ids=["x", "x"])])
    assert shown(it, A) == {"x": "Healthy"}


def test_beyond_the_message_limit_unclaimed_ids_are_left_out_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MESSAGE_LIMIT", 3 * limits.slot_bytes("d0", None))
    devices = [device(f"d{n}", A) for n in range(4)]
    it = inventory(A, devices=devices)
    (snapshot,) = it.take()
    assert list(snapshot.slots) == ["d0", "d1", "d2"]
    assert it.omitted(A) == 1
    it.claim([held(A, "d3", devices[3])])
    it.touch(A)
    (snapshot,) = it.take()
    assert list(snapshot.slots) == ["d0", "d1", "d3"]
    assert snapshot.changed is None
    it.update(KIND, {"d0": ()})
    (snapshot,) = it.take()
    assert list(snapshot.slots) == ["d1", "d2", "d3"]
    assert it.omitted(A) == 0
    assert snapshot.changed is None  # the one before was not whole


def test_no_ids_are_made_of_devices_that_a_full_list_has_no_room_for() -> None:
    made: list[str] = []

    class Counting(Fake):
        def ids(self, resource: Any, device: Device) -> Sequence[str]:
            made.append(device.key)
            return [f"{device.key}::{n:0100}" for n in range(10_000)]

    it = Inventory([resource(A)], {KIND: Counting()})
    it.ready(KIND)
    it.update(KIND, {f"u{n}": [device(f"d{n}", A, unit=f"u{n}")] for n in range(100)})
    assert len(made) == 4
    (snapshot,) = it.take()
    (why,) = {found.why for found in it.unclaimed()}
    assert f"its list is full: {len(snapshot.slots):,} such IDs fit in the 4 MiB that a kubelet receives" in why
    it.update(KIND, {"u0": []})
    assert len(made) == 5
    it.claim([Held(A, "any", KIND, frozenset({"d98"}))])  # which was seen late, say
    it.update(KIND, {"u98": []})
    it.update(KIND, {"u98": [device("d98", A, unit="u98")]})
    assert made[-1] == "d98"


# --- a kubelet that gave a device out twice, or forgot that it did ---


@pytest.mark.parametrize("reason", [FORGOTTEN, TWO_PODS])
def test_a_device_that_the_kubelet_gave_out_twice_or_forgot_is_unhealthy_unless_pods_may_share_it(reason: str) -> None:
    one, shared = device("one", A), device("shared", A, ids=["s1", "s2"])
    it = inventory(devices=[one, shared])
    it.claim([held(A, "one", one), held(A, "s1", shared)])
    assert (it.is_for_one((A, "one")), it.is_for_one((A, "s1")), it.is_for_one((B, "s1"))) == (True, False, False)
    it.claim([replace(held(A, "one", one), trouble=reason), replace(held(A, "s1", shared), trouble=reason)])
    assert shown(it, A) == {"one": reason, "s1": "Healthy", "s2": "Healthy"}
    it.update(KIND, by_unit([replace(one, attributes={**one.attributes, "more": ("1",)})]))
    assert shown(it, A)["one"] == reason
    again = inventory(devices=[one, shared])
    again.claim([replace(held(A, "one", one), trouble=reason)])
    assert shown(again, A)["one"] == reason, "also where that was known before the claim was"
    it.claim([held(A, "one", one)])
    assert shown(it, A)["one"] == "Healthy"
