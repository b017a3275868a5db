"""Resources whose names are templates: which names there are, who joins them, how long they stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.config.resources import fits
from agent.inventory.inventory import KEPT, MOST_EMPTY, Inventory
from agent.runtime.limits import resource_name_problem
from backends.base import Device, Resource, ResourceSpec
from tests.fakes import KIND, Fake, FakeOptions, by_unit, device, held, inventory, reconfigure

MIG = "nvidia.com/mig-{profile}"
SMALL, LARGE = "nvidia.com/mig-1g.5gb", "nvidia.com/mig-7g.40gb"
WHOLE = "nvidia.com/gpu"
BARE = "nvidia.com/{profile}"


def resource(name: str, kind: str = KIND, select: Sequence[Mapping[str, tuple[str, ...]]] = ()) -> Resource[Any]:
    return Resource(name, ResourceSpec(kind, FakeOptions(), select=tuple(select)))


def mig(key: str, *profiles: str, hardware: Sequence[str] | None = None) -> Device:
    found = device(key, hardware=hardware)
    return replace(found, attributes={**found.attributes, "profile": profiles} if profiles else found.attributes)


def configure(it: Inventory, *resources: Resource[Any]) -> None:
    reconfigure(it, resources, {KIND: Fake(*resources)})
    it.ready(KIND)


def shown(it: Inventory) -> dict[str, dict[str, str]]:
    return {n: {s.id: s.health.reason or s.health.state.value for s in it.slots(n).values()} for n in it.names()}


def reasons(it: Inventory) -> dict[str, str]:
    return {one.device.key: one.why for one in it.unclaimed()}


# --- which names there are ---


def test_devices_are_spread_over_names_made_of_their_attribute() -> None:
    it = inventory(resource(MIG), devices=[mig("a", "1g.5gb"), mig("b", "7g.40gb"), mig("c", "1g.5gb")])
    assert shown(it) == {SMALL: {"a": "Healthy", "c": "Healthy"}, LARGE: {"b": "Healthy"}}
    assert it.selection.given() == {MIG: (SMALL, LARGE)}


def test_a_template_without_a_device_gives_no_name() -> None:
    it = inventory(resource(MIG))
    assert (it.names(), it.take(), it.selection.given()) == ([], [], {MIG: ()})


def test_a_name_comes_with_its_first_device_and_stays_when_that_goes() -> None:
    it = inventory(resource(MIG))
    it.update(KIND, by_unit([mig("a", "1g.5gb")]))
    assert it.selection.given() == {MIG: (SMALL,)}
    assert [snapshot.resource for snapshot in it.take()] == [SMALL]
    it.update(KIND, {"a": ()})
    (snapshot,) = it.take()
    assert (snapshot.resource, dict(snapshot.slots), it.names()) == (SMALL, {}, [SMALL])


def test_a_name_without_a_device_goes_after_a_day_and_comes_back_with_its_device() -> None:
    it = inventory(resource(MIG))
    for now, devices in ((0.0, [mig("a", "1g.5gb")]), (10.0, ()), (10.0 + KEPT - 1, ())):
        it.update(KIND, {"a": devices})
        it.take(now)
        assert it.names() == [SMALL]
    revision = it.names_revision
    it.take(10.0 + KEPT)
    assert (it.names(), it.selection.given(), it.names_revision) == ([], {MIG: ()}, revision + 1)
    it.update(KIND, {"a": [mig("a", "1g.5gb")]})
    assert [snapshot.resource for snapshot in it.take(20.0 + KEPT)] == [SMALL]
    assert shown(it) == {SMALL: {"a": "Healthy"}}
    it.update(KIND, {"a": ()})
    it.take(30.0 + KEPT)
    assert it.names() == [SMALL], "its time begins again"


def test_what_a_pod_holds_keeps_a_name_however_long_its_device_is_gone() -> None:
    it = inventory(resource(MIG), devices=[mig("a", "1g.5gb")])
    claim = held(SMALL, "a", mig("a", "1g.5gb"))
    it.claim([claim])
    it.update(KIND, {"a": ()})
    for now in (1.0, 2 * KEPT):
        it.take(now)
        assert shown(it) == {SMALL: {"a": "gone"}}
    it.unclaim([claim])
    it.take(2 * KEPT + 1)
    assert it.names() == [SMALL]
    it.take(3 * KEPT + 1)
    assert it.names() == []


def test_of_names_that_come_and_go_the_latest_few_stay() -> None:
    it = inventory(resource(MIG))
    it.update(KIND, {"held": [mig("held", "held")], "there": [mig("there", "there")]})
    it.claim([held("nvidia.com/mig-held", "held", mig("held", "held"))])
    it.update(KIND, {"held": ()})
    for n in range(800):
        it.update(KIND, {"a": [mig("a", f"n{n}")]})
        it.take(float(n))
    latest = [f"nvidia.com/mig-n{n}" for n in range(799 - MOST_EMPTY, 800)]
    assert it.names() == sorted([*latest, "nvidia.com/mig-held", "nvidia.com/mig-there"])
    configure(it, resource(MIG), resource(WHOLE))
    it.take(900.0)
    assert len(it.names()) == MOST_EMPTY + 4, "a reload changes nothing of that"


def test_a_resource_that_a_template_gave_is_the_template_under_another_name() -> None:
    it = inventory(resource(MIG), devices=[mig("a", "1g.5gb")])
    given = it.resource(SMALL)
    assert given is not None
    assert (given.spec, given.template, given.configured) == (resource(MIG).spec, MIG, MIG)


def test_names_stand_where_their_template_does() -> None:
    devices = [mig("a", "7g.40gb"), mig("b", "1g.5gb"), device("w")]
    it = inventory(resource("a.b/first"), resource(MIG), resource("a.b/last"))
    reconfigure(
        it, [resource("a.b/first", select=[{"x": ("y",)}]), resource(MIG), resource("a.b/last")], {KIND: Fake()}
    )
    it.update(KIND, by_unit(devices))
    assert it.names() == ["a.b/first", SMALL, LARGE, "a.b/last"]


def test_a_device_that_an_earlier_resource_has_gives_no_name() -> None:
    it = inventory(resource(WHOLE), resource(MIG), devices=[mig("a", "1g.5gb")])
    assert shown(it) == {WHOLE: {"a": "Healthy"}}


def test_a_device_that_was_made_for_a_template_joins_what_it_gives() -> None:
    it = inventory(resource(MIG), devices=[replace(mig("a", "1g.5gb"), resource=MIG)])
    assert shown(it) == {SMALL: {"a": "Healthy"}}


# --- who is left out ---


def test_a_device_that_cannot_be_named_is_unclaimed_with_the_reason() -> None:
    it = inventory(resource(MIG), devices=[mig("none"), mig("two", "a", "b"), mig("odd", "++")])
    assert reasons(it) == {
        "none": f"{MIG} does not take it: it has no profile, after which it would be named",
        "two": f"{MIG} does not take it: it has more than one profile, after which it would be named: a, b",
        "odd": f"{MIG} does not take it: its profile is '++', of which nothing can be in a resource's name",
    }
    assert it.names() == []


def test_a_name_that_is_a_resource_of_its_own_is_that_ones() -> None:
    own = resource(SMALL, select=[{"profile": ("none",)}])
    it = inventory(own, resource(MIG), devices=[mig("a", "1g.5gb")])
    assert shown(it) == {SMALL: {}}
    assert reasons(it)["a"].endswith(
        f"{MIG} does not take it: its name would be {SMALL}, which is a resource of its own"
    )


def test_a_name_is_one_values_and_the_other_device_is_told_whose() -> None:
    it = inventory(resource(MIG), devices=[mig("a", "1g+me"), mig("b", "1g.me"), mig("c", "1g+me")])
    assert shown(it) == {"nvidia.com/mig-1g.me": {"a": "Healthy", "c": "Healthy"}}
    assert reasons(it) == {
        "b": "nvidia.com/mig-1g.me selects it, but that name stands for profile '1g+me' already, and this has profile '1g.me'"
    }


def test_a_value_that_was_first_keeps_its_name_whatever_comes_later() -> None:
    it = inventory(resource(MIG), devices=[mig("b", "1g.me")])
    it.update(KIND, by_unit([mig("a", "1g+me")]))
    assert shown(it) == {"nvidia.com/mig-1g.me": {"b": "Healthy"}}
    configure(it, resource(MIG), resource(WHOLE))
    assert shown(it) == {"nvidia.com/mig-1g.me": {"b": "Healthy"}, WHOLE: {"a": "Healthy"}}


def test_what_a_pod_holds_keeps_its_name_over_a_restart() -> None:
    it = inventory(resource(MIG))
    found = mig("b", "1g.me")
    it.claim([held("nvidia.com/mig-1g.me", "b", found)])
    it.update(KIND, by_unit([mig("a", "1g+me"), found]))
    assert shown(it) == {"nvidia.com/mig-1g.me": {"b": "Healthy"}}


# --- what pods hold ---


def test_a_claim_brings_its_name_back_without_a_device() -> None:
    it = inventory(resource(MIG))
    it.claim([held(SMALL, "a", mig("a", "1g.5gb"))])
    assert shown(it) == {SMALL: {"a": "gone"}}
    it.update(KIND, by_unit([mig("a", "1g.5gb")]))
    assert shown(it) == {SMALL: {"a": "Healthy"}}
    it.unclaim([held(SMALL, "a")])
    assert shown(it) == {SMALL: {"a": "Healthy"}}


def test_a_claim_of_another_backend_brings_nothing_into_force() -> None:
    it = inventory(resource(MIG))
    it.claim([replace(held(SMALL, "a"), backend="other")])
    assert shown(it) == {SMALL: {"a": "retired"}}


def test_what_is_ours_of_all_that_a_kubelet_remembers() -> None:
    it = inventory(resource(WHOLE), resource(MIG))
    assert [it.kind(name) for name in (WHOLE, SMALL, "nvidia.com/vgpu", "a.b/c")] == [KIND, KIND, None, None]


def test_a_template_that_fits_every_name_takes_only_those_that_it_gave() -> None:
    it = inventory(resource(BARE), devices=[mig("a", "T4")])
    assert [it.kind(name) for name in ("nvidia.com/T4", WHOLE)] == [KIND, None]
    it.claim([held("nvidia.com/A10", "b")])  # as our own memory has it
    assert it.kind("nvidia.com/A10") == KIND


# --- another configuration ---


def test_what_a_removed_template_gave_retires() -> None:
    it = inventory(resource(MIG), devices=[mig("a", "1g.5gb"), mig("b", "7g.40gb")])
    it.claim([held(SMALL, "a", mig("a", "1g.5gb"))])
    it.take()
    configure(it, resource(WHOLE))
    it.take()
    assert shown(it) == {WHOLE: {"b": "Healthy"}, SMALL: {"a": "retired"}}


def test_what_a_template_gave_stays_when_it_changes() -> None:
    it = inventory(resource(MIG), devices=[mig("a", "1g.5gb"), mig("b", "7g.40gb")])
    it.update(KIND, {"b": ()})
    only = resource(MIG, select=[{"profile": ("1g.5gb",)}])
    configure(it, only)
    assert shown(it) == {SMALL: {"a": "Healthy"}, LARGE: {}}
    given = it.resource(LARGE)
    assert given is not None
    assert given.spec == only.spec


@pytest.mark.parametrize(
    ("before", "now", "lists"),
    [
        pytest.param([WHOLE], [MIG, WHOLE], {SMALL: {"a": "Healthy"}, WHOLE: {}}, id="it comes"),
        pytest.param([MIG], ["a.b/{profile}"], {"a.b/1g.5gb": {"a": "Healthy"}}, id="it is renamed"),
        pytest.param([MIG, WHOLE], [WHOLE, MIG], {WHOLE: {"a": "Healthy"}, SMALL: {}}, id="it comes second now"),
    ],
)
def test_devices_follow_a_template_that_changes(before: list[str], now: list[str], lists: dict[str, Any]) -> None:
    it = inventory(*map(resource, before), devices=[mig("a", "1g.5gb")])
    configure(it, *map(resource, now))
    it.take()
    assert shown(it) == lists


def test_a_name_that_was_written_out_goes_on_when_a_template_gives_it() -> None:
    it = inventory(resource(SMALL), devices=[mig("a", "1g.5gb")])
    it.claim([held(SMALL, "a", mig("a", "1g.5gb"))])
    it.take()
    configure(it, resource(MIG))
    assert shown(it) == {SMALL: {"a": "Healthy"}}
    assert it.take() == []
    configure(it, resource(SMALL))
    assert shown(it) == {SMALL: {"a": "Healthy"}}
    assert it.selection.given() == {}


def test_a_name_that_is_written_out_beside_its_template_is_the_written_ones() -> None:
    it = inventory(resource(MIG), devices=[mig("a", "1g.5gb"), mig("b", "7g.40gb")])
    own = resource(SMALL, select=[{"profile": ("1g.5gb",)}])
    configure(it, own, resource(MIG))
    assert shown(it) == {SMALL: {"a": "Healthy"}, LARGE: {"b": "Healthy"}}
    assert it.selection.given() == {MIG: (LARGE,)}
    assert it.resource(SMALL) == own


def test_what_retires_is_in_force_again_when_a_template_comes_that_gives_its_name() -> None:
    it = inventory(resource(WHOLE))
    it.claim([held(SMALL, "a", mig("a", "1g.5gb"))])
    assert shown(it) == {WHOLE: {}, SMALL: {"a": "retired"}}
    configure(it, resource(MIG))
    it.take()
    assert shown(it) == {SMALL: {"a": "gone"}}


# --- whatever happens ---

_PROFILES = st.lists(st.sampled_from(["1g", "1g+me", "1g.me", "1g me", "1g_me", "++", "x" * 70]), max_size=2)
_DEVICES = st.builds(
    lambda key, profiles, hardware: mig(key, *profiles, hardware=hardware),
    st.sampled_from("abcd"),
    _PROFILES,
    st.lists(st.sampled_from(["h1", "h2", "h3", "h4", "h5"]), min_size=1, max_size=2, unique=True),
)
_CONFIGS = st.lists(
    st.sampled_from([MIG, "nvidia.com/part-{profile}", WHOLE, "nvidia.com/mig-1g"]), min_size=1, max_size=3, unique=True
)
_STEPS = st.lists(
    st.tuples(st.just("look"), _DEVICES)
    | st.tuples(st.just("go"), st.sampled_from("abcd"))
    | st.tuples(st.just("give"), st.integers(0, 5))
    | st.tuples(st.just("remember"), st.sampled_from(["nvidia.com/mig-1g.me", "nvidia.com/part-1g"]))
    | st.tuples(st.just("reload"), _CONFIGS),
    max_size=12,
)


def _take(it: Inventory, step: tuple[str, Any], claimed: set[tuple[str, str]]) -> None:
    kind, what = step
    if kind == "look":
        it.update(KIND, by_unit([what]))
    elif kind == "go":
        it.update(KIND, {what: ()})
    elif kind == "reload":
        configure(it, *map(resource, what))
    elif kind == "remember":
        it.claim([held(what, "z")])
        claimed.add((what, "z"))
    elif slots := [(name, slot) for name in it.names() for slot in it.slots(name).values() if slot.device]:
        name, slot = slots[what % len(slots)]
        it.claim([held(name, slot.id, slot.device)])
        claimed.add((name, slot.id))


@given(_CONFIGS, _STEPS)
def test_every_device_has_one_valid_name_at_most_and_no_name_two_values(
    names: list[str], steps: list[tuple[str, Any]]
) -> None:
    it, claimed = inventory(*map(resource, names)), set[tuple[str, str]]()
    for step in steps:
        _take(it, step, claimed)
        it.take()
        listed = {(name, slot.id): slot.device for name in it.names() for slot in it.slots(name).values()}
        assert claimed <= listed.keys()
        assert all(resource_name_problem(name) is None for name in it.names())
        places = [key for key, found in listed.items() if found is not None]
        assert len({device_id for _, device_id in places}) == len(places)
        for template, given_names in it.selection.given().items():
            for name in given_names:
                assert fits(template, name)
                values = {found.attributes["profile"][0] for (n, _), found in listed.items() if n == name and found}
                assert len(values) <= 1
        left = {one.device.key for one in it.unclaimed()}
        assert left.isdisjoint(found.key for found in listed.values() if found)
        assert all(one.why for one in it.unclaimed())
