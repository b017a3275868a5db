from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.inventory.lists import Listing
from agent.inventory.selection import Found
from agent.kubelet.plugin import EncodedList
from agent.model import HEALTHY, Health, Slot, State
from agent.runtime import limits
from tests.fakes import device, held

NAME = "a.example/one"
REF = Found("kind", "unit", device("key"), (), ())
SICK = Health(State.UNHEALTHY, "sick")
DEVICES = (device("d"), device("e", numa_node=1), device("f", numa_node=300))

slots = st.builds(
    Slot, st.text("abü", min_size=1, max_size=3), st.sampled_from((None, *DEVICES)), st.sampled_from([HEALTHY, SICK])
)


def listing(*written: Slot) -> Listing:
    made = Listing(NAME)
    for slot in written:
        made.write({slot.id: slot})
    return made


def test_writing_what_is_there_changes_nothing() -> None:
    found = device("d")
    it = listing(Slot("x", found, SICK))
    it.snapshot()
    it.write({"x": Slot("x", device("d"), SICK)})
    it.drop("y")
    assert not it.dirty


def test_what_is_well_again_before_anybody_was_told_has_no_date() -> None:
    found = device("d")
    it = listing(Slot("x", found, HEALTHY))
    it.snapshot(1.0)
    it.write({"x": Slot("x", found, SICK)})
    it.write({"x": Slot("x", found, HEALTHY)})
    assert it.snapshot(2.0).slots["x"].health is HEALTHY


def test_a_snapshot_is_not_altered_by_what_comes_later() -> None:
    it = listing(Slot("x", None, SICK))
    before = it.snapshot()
    it.drop("x")
    assert list(before.slots) == ["x"]
    after = it.snapshot()
    assert (after.generation, after.changed, len(after.slots)) == (before.generation + 1, frozenset("x"), 0)


@given(st.lists(slots | st.sampled_from("abc"), max_size=12))
def test_it_leaves_out_what_has_no_room_in_its_larger_form_also_of_ids_without_a_device(
    steps: list[Slot | str],
) -> None:
    it = Listing(NAME)
    for step in steps:
        if isinstance(step, Slot):
            it.owners.pop(step.id, None)
            it.owners |= {step.id: REF} if step.device else {}
            it.write({step.id: step})
        else:
            it.owners.pop(step, None)
            it.drop(step)
    encoded = EncodedList()
    it.write({slot.id: Slot(slot.id, slot.device, SICK) for slot in it.slots.values()})
    encoded.apply(it.snapshot())
    size = sum(limits.slot_bytes(i, slot.device.numa_node) for i, slot in it.slots.items() if slot.device)
    with pytest.MonkeyPatch.context() as limited:
        for most, omitted in (len(encoded.message()), False), (len(encoded.message()) - 1, bool(it.slots)):
            limited.setattr(limits, "MESSAGE_LIMIT", most)
            it.snapshot(size=size)
            assert bool(it.omitted) is omitted


def test_claimed_ids_are_never_left_out_even_if_they_alone_pass_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MESSAGE_LIMIT", 40)
    it = listing(*(Slot(f"x{n}", None, SICK) for n in range(9)))
    for n in (4, 7, 8):
        it.claims[f"x{n}"] = held(NAME, f"x{n}")
    assert list(it.snapshot().slots) == ["x4", "x7", "x8"]
    assert it.omitted == 6


def test_a_list_that_fits_again_is_whole_and_all_of_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    it = listing(Slot("x", None, SICK), Slot("y", None, SICK))
    monkeypatch.setattr(limits, "MESSAGE_LIMIT", limits.slot_bytes("x", None))
    assert list(it.snapshot().slots) == ["x"]
    monkeypatch.undo()
    whole = it.snapshot()
    assert (list(whole.slots), whole.changed, it.omitted) == (["x", "y"], None, 0)
    assert it.snapshot().changed == frozenset()
