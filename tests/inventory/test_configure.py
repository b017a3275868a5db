"""Another configuration: what changes hands, what is listed anew, and what stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from agent.inventory.inventory import Inventory
from backends.base import Device, Resource
from tests import fakes
from tests.fakes import KIND, Fake, Sharing, device, held, reconfigure, resource, shown

A, B = "a.example/one", "b.example/two"


def inventory(*names: str, devices: Sequence[Device] = ()) -> Inventory:
    return fakes.inventory(*map(resource, names or (A, B)), devices=devices)


def configure(
    it: Inventory, *resources: Resource[Any], units: Mapping[str, tuple[Device, ...]] = MappingProxyType({})
) -> None:
    reconfigure(it, resources, {KIND: Sharing(*resources)}, {KIND: units})
    it.ready(KIND)


def test_a_device_of_a_resource_that_is_removed_falls_to_the_next_that_takes_it() -> None:
    it = inventory(devices=[device("d", A, B)])
    configure(it, resource(B))
    it.take()
    assert it.names() == [B]
    assert shown(it, B) == {"d": "Healthy"}


def test_a_resource_that_comes_first_now_takes_what_nobody_holds() -> None:
    free, taken = device("free", A, B), device("taken", A, B)
    it = inventory(devices=[free, taken])
    it.claim([held(A, "taken", taken)])
    configure(it, resource(B), resource(A))
    assert shown(it, A) == {"taken": "Healthy"}
    assert shown(it, B) == {"free": "Healthy"}


def test_an_order_that_changes_for_what_shares_hardware_alone_changes_who_has_it() -> None:
    one, two = device("one", A, hardware=["h"]), device("two", B, hardware=["h"])
    it = inventory(devices=[one, two])
    configure(it, resource(B), resource(A))
    assert (shown(it, A), shown(it, B)) == ({}, {"two": "Healthy"})
    configure(it, resource(A), resource("new.example/x"), resource(B))
    assert (shown(it, A), shown(it, B)) == ({"one": "Healthy"}, {})


def test_an_id_that_a_device_gives_up_falls_to_another_that_has_it_too() -> None:
    one, two = device("one", A, "other", ids=["x"]), device("two", A, B, ids=["x"])
    it = inventory(devices=[one, two])
    assert it.slots(A)["x"].device == one
    assert it.slots(B)["x"].device == two
    picky = replace(resource(A), spec=replace(resource(A).spec, exclude=({"taken_by": ("other",)},)))
    configure(it, picky, resource(B))
    assert it.slots(A)["x"].device == two
    assert shown(it, B) == {}


def test_what_a_reload_does_not_concern_is_not_listed_anew() -> None:
    mine, theirs = device("mine", A), device("theirs", B)
    it = inventory(devices=[mine, theirs])
    it.take()
    configure(it, resource(A, replicas=2), resource(B))
    assert [snapshot.resource for snapshot in it.take()] == [A]
    configure(it, resource(A, replicas=2), resource(B), resource("new.example/x"))
    assert [snapshot.resource for snapshot in it.take()] == ["new.example/x"]
    configure(it, resource(B))
    assert [(snapshot.resource, dict(snapshot.slots)) for snapshot in it.take()] == [(A, {})]


def test_what_another_backend_is_to_offer_leaves_all_others_as_they_were() -> None:
    it = inventory(devices=[device("d", A)])
    it.take()
    backends = {KIND: Fake(), "other": Fake()}
    reconfigure(it, [resource("new.example/x", kind="other"), resource(A), resource(B)], backends)
    it.ready("other")
    assert shown(it, A) == {"d": "Healthy"}
    assert [snapshot.resource for snapshot in it.take()] == ["new.example/x"]


def test_a_resource_that_is_removed_retires_and_is_live_again_when_it_is_back_in_time() -> None:
    given, free = device("given", A), device("free", A)
    it = inventory(devices=[given, free])
    it.claim([held(A, "given", given)])
    configure(it, resource(B))
    it.take()
    assert it.names() == [B, A]
    assert shown(it, A) == {"given": "retired"}
    assert it.resource(A) is None
    configure(it, resource(A), resource(B))
    assert shown(it, A) == {"given": "Healthy", "free": "Healthy"}


def test_a_tombstone_says_gone_again_when_its_resource_is_back_without_the_device() -> None:
    it = inventory()
    it.claim([held(A, "d", device("d", A))])
    configure(it)
    assert shown(it, A) == {"d": "retired"}
    configure(it, resource(A))
    assert shown(it, A) == {"d": "gone"}


def test_a_renamed_resource_gets_what_nobody_holds_and_the_rest_when_it_is_let_go() -> None:
    given, free = device("given", A, B), device("free", A, B)
    it = inventory(A, devices=[given, free])
    it.claim([held(A, "given", given)])
    configure(it, resource(B))
    assert (shown(it, A), shown(it, B)) == ({"given": "retired"}, {"free": "Healthy"})
    it.unclaim([held(A, "given", given)])
    it.take()
    assert it.names() == [B]
    assert shown(it, B) == {"given": "Healthy", "free": "Healthy"}


def test_what_a_new_instance_finds_comes_with_the_new_resources_in_one_list() -> None:
    it = inventory(A, devices=[device("old", A, unit="u")])
    it.take()
    configure(it, resource(A, replicas=2), units={"u": (device("new", A, unit="u"),)})
    (snapshot,) = it.take()
    assert sorted(snapshot.slots) == ["new::0", "new::1"]


def test_a_new_resource_is_not_listed_before_its_backend_is_ready() -> None:
    it = inventory(A)
    it.take()
    reconfigure(it, [resource(A), resource(B, kind="other")], {KIND: Fake(), "other": Fake()})
    assert it.take() == []
    it.ready("other")
    assert [snapshot.resource for snapshot in it.take()] == [B]


def test_no_more_pods_than_a_device_has_ids_get_it_whatever_ids_it_had_before() -> None:
    """A7.4: the kubelet would give the same hardware away again, under the new ID."""
    found = device("d", A)
    it = inventory(A, devices=[found])
    it.claim([held(A, "d", found)])
    configure(it, resource(A, replicas=2))
    assert shown(it, A) == {"d": "Healthy", "d::0": "Healthy", "d::1": "held"}
    assert it.slots(A)["d::1"].health.message == "a pod holds the same hardware under another ID, d"
    assert it.slots(A)["d"].device == found, "the pod may start again"
    it.claim([held(A, "d::0", found)])
    configure(it, resource(A))
    assert shown(it, A) == {"d": "held", "d::0": "held"}, "either pod may end before we know of it"
    it.unclaim([held(A, "d", found)])
    assert shown(it, A) == {"d": "held", "d::0": "Healthy"}
    it.unclaim([held(A, "d::0", found)])
    assert shown(it, A) == {"d": "Healthy"}


def test_another_card_in_the_place_of_one_that_a_pod_holds_is_kept_back_from_nobody() -> None:
    old, new = (device(key, A, hardware=["slot"], identity=key, unit="u") for key in ("old", "new"))
    it = inventory(A, devices=[old])
    it.claim([held(A, "old", old)])
    it.update(KIND, {"u": (new,)})
    assert shown(it, A) == {"old": "gone", "new": "Healthy"}


def test_hardware_that_a_pod_holds_under_an_id_that_another_device_has_now_is_kept_back() -> None:
    """Whichever device was seen first."""
    was, other = device("was", A, ids=["new"]), device("other", A, ids=["old"])
    for found in ([was, other], [other, was]):
        it = inventory(A)
        it.claim([held(A, "old", was)])
        for one in found:
            it.update(KIND, {one.unit: (one,)})
        assert shown(it, A) == {"old": "replaced", "new": "held"}


def test_what_a_pod_has_through_another_plugin_is_held_under_another_configuration_too() -> None:
    found = device("d", A)
    it = inventory(A, devices=[found])
    theirs = replace(held("their.example/x", "0", found), foreign=True)
    it.claim([theirs])
    it.take()
    configure(it, resource(A), resource(B))
    assert shown(it, A) == {"d": "held"}
    assert [snapshot.resource for snapshot in it.take()] == [B]
    it.unclaim([theirs])
    assert shown(it, A) == {"d": "Healthy"}
