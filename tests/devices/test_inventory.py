from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent import limits
from agent.devices.inventory import Inventory
from agent.devices.model import HEALTHY, Health, Held, Slot, State
from backends.base import Device
from tests.devices.fakes import KIND, Fake, by_unit, device, held, resource

A, B = "a.example/one", "b.example/two"
SICK = Health(State.UNHEALTHY, "sick", "It is sick.")
WEAK = Health(State.DEGRADED, "weak", "It is weak.")


def inventory(*names: str, devices: Sequence[Device] = ()) -> Inventory:
    resources = [resource(name) for name in names or (A, B)]
    made = Inventory(resources, {KIND: Fake(*resources)})
    made.update(KIND, by_unit(devices))
    made.ready(KIND)
    return made


def shown(it: Inventory, name: str) -> dict[str, str]:
    return {slot.id: slot.health.reason or slot.health.state.value for slot in it.slots(name).values()}


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
    assert {slot.device for slot in it.slots(B).values()} == {two}


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


def test_another_card_at_the_same_address_is_unhealthy_until_the_pod_lets_go() -> None:
    first, second = device("d", A, identity="serial 1"), device("d", A, identity="serial 2")
    it = inventory(devices=[first])
    it.claim([held(A, "d", first)])
    it.update(KIND, by_unit([second]))
    assert shown(it, A) == {"d": "replaced"}
    assert it.slots(A)["d"].health.message == "another device (serial 2) is where the pod's (serial 1) was"
    it.unclaim([held(A, "d", first)])
    assert shown(it, A) == {"d": "Healthy"}


def test_other_hardware_under_the_claimed_id_is_not_what_the_pod_was_given() -> None:
    it = inventory(devices=[device("d", A, hardware=["slot 2"])])
    it.claim([Held(A, "d", KIND, frozenset({"slot 1"}))])
    assert shown(it, A) == {"d": "replaced"}
    assert it.slots(A)["d"].health.message == "another device (slot 2) is where the pod's (slot 1) was"


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


def test_a_look_that_finds_the_same_changes_nothing() -> None:
    it = inventory(devices=[device("d", A)])
    it.take()
    it.update(KIND, by_unit([device("d", A)]))
    assert it.take() == []


def test_an_allocate_of_what_is_listed_changes_no_list() -> None:
    found = device("d", A)
    it = inventory(devices=[found])
    it.take()
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


# --- the kubelet's message limit ---


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


# --- whatever happens, in whatever order ---

NAMES = (A, B, "c.example/three")
RETIRED = "old.example/four"
HARDWARE = ("h0", "h1", "h2", "h3")
IDS = ("i0", "i1", "i2", "i3")

some_devices = st.builds(
    lambda key, taken_by, hardware, depends, ids, identity, numa: device(
        key, *taken_by, hardware=hardware, depends=depends, ids=ids, identity=identity, numa_node=numa
    ),
    st.sampled_from(["k0", "k1", "k2"]),
    st.lists(st.sampled_from(NAMES), max_size=3, unique=True),
    st.frozensets(st.sampled_from(HARDWARE), min_size=1, max_size=2),
    st.frozensets(st.sampled_from(HARDWARE), max_size=1),
    st.lists(st.sampled_from(IDS), min_size=1, max_size=2, unique=True),
    st.sampled_from(["", "serial 1", "serial 2"]),
    st.sampled_from([None, 0, 1]),
)
some_units = st.dictionaries(
    st.sampled_from(["u0", "u1", "u2"]), st.lists(some_devices, max_size=2, unique_by=lambda d: d.key), max_size=2
).map(lambda units: {unit: tuple(replace(d, unit=unit) for d in devices) for unit, devices in units.items()})
some_held = st.builds(
    Held,
    st.sampled_from((*NAMES, RETIRED)),
    st.sampled_from(IDS),
    st.just(KIND),
    st.frozensets(st.sampled_from(HARDWARE), max_size=2),
    st.sampled_from(["", "serial 1", "serial 2"]),
)


class AnyOrder(RuleBasedStateMachine):
    """Feeds an inventory, and checks it against what was fed."""

    def __init__(self) -> None:
        super().__init__()
        self.resources = [resource(name) for name in NAMES]
        self.it = Inventory(self.resources, {KIND: Fake(*self.resources)})
        self.it.ready(KIND)
        self.units: dict[str, tuple[Device, ...]] = {}
        self.claims: dict[tuple[str, str], Held] = {}
        self.health: dict[str, Health] = {}
        self.lists: dict[str, dict[str, Slot]] = {}

    @rule(units=some_units)
    def look(self, units: Mapping[str, tuple[Device, ...]]) -> None:
        self.units |= units
        self.it.update(KIND, units)

    @rule(changes=st.dictionaries(st.sampled_from(HARDWARE), st.sampled_from([HEALTHY, WEAK, SICK])))
    def fall_ill(self, changes: Mapping[str, Health]) -> None:
        self.health |= changes
        self.it.set_health(changes)

    @precondition(lambda self: any(self.it.slots(name) for name in NAMES))
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        slots = [(name, slot) for name in NAMES for slot in self.it.slots(name).values() if slot.device]
        if slots:
            name, slot = data.draw(st.sampled_from(slots))
            given = held(name, slot.id, slot.device)
            self.remember([given])
            if slot.health.reason != "replaced":  # else the kubelet does not ask for it
                assert held(name, slot.id, self.it.slots(name)[slot.id].device) == given, "what is given stays there"

    @rule(claims=st.lists(some_held, min_size=1, max_size=3))
    def remember(self, claims: Sequence[Held]) -> None:
        self.claims |= {claim.slot: claim for claim in claims}
        self.it.claim(claims)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        ended = data.draw(st.lists(st.sampled_from(list(self.claims.values())), min_size=1, unique=True))
        for claim in ended:
            del self.claims[claim.slot]
        self.it.unclaim(ended)

    @rule()
    def take(self) -> None:
        for snapshot in self.it.take():
            before = self.lists.get(snapshot.resource, {})
            changed = before.keys() | snapshot.slots.keys() if snapshot.changed is None else snapshot.changed
            after = {i: slot for i, slot in before.items() if i not in changed}
            after |= {i: snapshot.slots[i] for i in changed if i in snapshot.slots}
            assert after == snapshot.slots, "applying what changed gives the new list"
            self.lists[snapshot.resource] = dict(snapshot.slots)
        listed = {name: slots for name, slots in self.lists.items() if slots}
        assert listed == {name: dict(self.it.slots(name)) for name in self.it.names() if self.it.slots(name)}

    def slots(self) -> list[tuple[str, Slot]]:
        return [(name, slot) for name in self.it.names() for slot in self.it.slots(name).values()]

    @invariant()
    def every_claimed_id_is_listed(self) -> None:
        assert self.claims.keys() <= {(name, slot.id) for name, slot in self.slots()}

    @invariant()
    def without_a_device_there_is_a_claim_and_the_slot_is_unhealthy(self) -> None:
        for name, slot in self.slots():
            if slot.device is None:
                assert (name, slot.id) in self.claims
                assert slot.health.reason == ("gone" if name in NAMES else "retired")

    @invariant()
    def a_retired_resource_is_all_unhealthy_and_listed_while_it_is_held(self) -> None:
        assert {slot.health.offered for name, slot in self.slots() if name == RETIRED} <= {False}
        if any(name == RETIRED for name, _ in self.claims):
            assert RETIRED in self.it.names()

    @invariant()
    def hardware_is_in_one_resource_at_most(self) -> None:
        where: dict[str, set[str]] = {}
        for name, slot in self.slots():
            for hardware in slot.device.hardware if slot.device else ():
                where.setdefault(hardware, set()).add(name)
        assert all(len(names) == 1 for names in where.values())

    @invariant()
    def what_a_pod_holds_is_offered_by_no_other_resource(self) -> None:
        holders: dict[str, set[str]] = {}
        for claim in self.claims.values():
            for hardware in claim.hardware:
                holders.setdefault(hardware, set()).add(claim.resource)
        for name, slot in self.slots():
            for hardware in slot.device.hardware if slot.device else ():
                assert name in holders.get(hardware, {name})

    @invariant()
    def health_is_the_devices_unless_it_is_not_what_the_pod_was_given(self) -> None:
        for name, slot in self.slots():
            if slot.device is None:
                continue
            claim = self.claims.get((name, slot.id), Held(name, slot.id, KIND))
            another_card = claim.identity not in ("", slot.device.identity)
            if another_card or (claim.hardware and claim.hardware.isdisjoint(slot.device.hardware)):
                assert slot.health.reason == "replaced"
            else:
                said = {self.health.get(h, HEALTHY).state for h in slot.device.hardware | slot.device.depends}
                worst = next(s for s in (State.UNHEALTHY, State.DEGRADED, State.HEALTHY) if s in said)
                assert slot.health.state is worst

    @invariant()
    def every_device_is_placed_whole_or_left_out_with_a_reason(self) -> None:
        left_out = [lost.device for lost in self.it.unclaimed()]
        assert all(lost.why for lost in self.it.unclaimed())
        listed = [slot for _, slot in self.slots() if slot.device]
        for found in (found for devices in self.units.values() for found in devices):
            ids = {slot.id for slot in listed if slot.device == found}
            assert ids == (set() if found in left_out else set(found.attributes["ids"]))

    @invariant()
    def the_order_in_which_all_this_came_does_not_matter(self) -> None:
        fresh = Inventory(self.resources, {KIND: Fake(*self.resources)})
        fresh.set_health(self.health)
        fresh.claim(reversed(list(self.claims.values())))
        for unit, devices in sorted(self.units.items(), reverse=True):
            fresh.update(KIND, {unit: devices})
        ours = {name: self.it.slots(name) for name in self.it.names() if self.it.slots(name)}
        assert ours == {name: fresh.slots(name) for name in fresh.names() if fresh.slots(name)}
        assert [lost.device for lost in self.it.unclaimed()] == [lost.device for lost in fresh.unclaimed()]


AnyOrder.TestCase.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None, report_multiple_bugs=False
)
test_whatever_happens_in_whatever_order = AnyOrder.TestCase
