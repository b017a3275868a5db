"""Hardware that only one device of a resource may have: never in two pods, whatever is paired with what."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.inventory.inventory import Inventory
from agent.model import Held, ResourceClaim
from backends.base import Device
from backends.chardev.bundles import Matches, pair
from tests.fakes import KIND, Fake, device, held, resource

A = "a.example/one"
UNIT = "bundle:" + A


def inventory(*devices: Device) -> Inventory:
    it = Inventory([resource(A)], {KIND: Fake(resource(A))})
    it.ready(KIND)
    look(it, *devices)
    return it


def look(it: Inventory, *devices: Device) -> None:
    it.update(KIND, {UNIT: devices})


def lone(key: str, *hardware: str, ids: tuple[str, ...] | None = None) -> Device:
    return device(key, A, hardware=hardware, exclusive=hardware, unit=UNIT, identity="+".join(hardware), ids=ids)


def shown(it: Inventory) -> dict[str, str]:
    return {i: slot.health.reason or slot.health.state.value for i, slot in it.slots(A).items()}


def whys(it: Inventory) -> list[str]:
    return [lost.why for lost in it.unclaimed()]


def test_two_names_of_one_node_are_offered_once_under_the_first() -> None:
    it = inventory(lone("pci-usbv2-1", "node"), lone("pci-usb-1", "node"))
    assert shown(it) == {"pci-usb-1": "Healthy"}
    assert whys(it) == [f"{A} selects it, but node is offered as pci-usb-1 already"]
    look(it, lone("pci-usbv2-1", "node"))
    assert shown(it) == {"pci-usbv2-1": "Healthy"}


def test_the_name_that_a_pod_knows_goes_before_the_first() -> None:
    it = inventory(lone("b", "node"))
    it.claim([held(A, "b", lone("b", "node"))])
    look(it, lone("b", "node"), lone("a", "node"))
    assert shown(it) == {"b": "Healthy"}


def test_what_a_resource_claim_has_is_given_to_no_pod_once_its_resource_is_served_by_device_plugin() -> None:
    by_claim = replace(held(A, "a", lone("a", "node")), claim=ResourceClaim("u", "team", "train", "pool", "a"))
    by_dra = replace(resource(A), spec=replace(resource(A).spec, serve="dra"))
    before = Inventory([by_dra], {KIND: Fake(by_dra)})
    before.ready(KIND)
    look(before, lone("a", "node"), lone("b", "other"))
    before.claim([by_claim])
    assert shown(before) == {"a": "Healthy", "b": "Healthy"}
    it = inventory(lone("a", "node"), lone("b", "other"))
    it.claim([by_claim])
    assert shown(it) == {"a": "held", "b": "Healthy"}
    assert "ResourceClaim team/train has it" in it.slots(A)["a"].health.message
    it.unclaim([by_claim])
    assert shown(it) == {"a": "Healthy", "b": "Healthy"}


def test_one_that_is_not_exclusive_to_one_device_may_be_in_others() -> None:
    one, two = (device(k, A, hardware=[k, "fuse"], exclusive=[k], unit=UNIT) for k in ("one", "two"))
    assert shown(inventory(one, two)) == {"one": "Healthy", "two": "Healthy"}
    greedy = device("zz", A, hardware=["fuse"], exclusive=["fuse"], unit=UNIT)
    assert shown(inventory(one, two, greedy)) == {"one": "Healthy", "two": "Healthy"}


def test_what_a_pod_holds_is_not_offered_in_another_bundle_until_the_pod_ends() -> None:
    one, two = lone("s1", "s1", "v1"), lone("s2", "s2", "v2")
    it = inventory(lone("s0", "s0", "v0"), one, two)
    claim = held(A, "s1", one)
    it.claim([claim])
    look(it, lone("s1", "s1", "v0"), lone("s2", "s2", "v1"))  # s0 is gone, and every pair has moved
    assert shown(it) == {"s1": "replaced"}
    assert whys(it) == [f"{A} selects it, but v1 is held by a pod as s1"]
    it.unclaim([claim])
    assert shown(it) == {"s1": "Healthy", "s2": "Healthy"}


def test_two_pods_whose_bundles_both_changed_are_both_told_so() -> None:
    one, two = lone("s1", "s1", "v1"), lone("s2", "s2", "v2")
    it = inventory(one, two)
    it.claim([held(A, "s1", one), held(A, "s2", two)])
    look(it, lone("s1", "s1", "v0"), lone("s2", "s2", "v1"))
    assert shown(it) == {"s1": "replaced", "s2": "replaced"}


def test_a_device_with_several_ids_is_offered_as_often_as_it_has_ids_though_a_pod_holds_another() -> None:
    before = lone("kvm", "node", ids=("kvm0", "kvm1", "kvm2"))
    it = inventory(before)
    it.claim([held(A, "kvm2", before)])
    look(it, lone("kvm", "node", ids=("kvm0", "kvm1")))
    assert shown(it) == {"kvm0": "Healthy", "kvm1": "held", "kvm2": "Healthy"}
    it.unclaim([held(A, "kvm2", before)])
    assert shown(it) == {"kvm0": "Healthy", "kvm1": "Healthy"}


def test_what_a_pod_has_by_the_id_of_another_device_is_given_once_less() -> None:
    """Pairs that two pods may share are paired anew under one of them."""
    before = lone("k0", "h0", "h1", ids=("k0::0", "k0::1"))
    it = inventory(before)
    it.claim([held(A, "k0::0", before)])
    look(it, lone("k0", "h0", ids=("k0::0", "k0::1")), lone("k1", "h1", ids=("k1::0", "k1::1")))
    assert [i for i, why in shown(it).items() if why == "held"] == ["k1::1"]
    it.unclaim([held(A, "k0::0", before)])
    assert set(shown(it).values()) == {"Healthy"}


def test_what_a_pod_has_is_kept_back_as_soon_as_its_id_is_gone_and_no_longer_than_that() -> None:
    """The pod was given both, under the ID that one of them has now; neither is exclusive, and they have nothing in common."""
    one, two = device("one", A, unit=UNIT), device("two", A, unit=UNIT)
    it = inventory(one, two)
    it.claim([Held(A, "two", KIND, one.hardware | two.hardware)])
    assert shown(it) == {"one": "Healthy", "two": "Healthy"}
    look(it, one)
    assert shown(it) == {"one": "held", "two": "gone"}
    look(it, one, two)
    assert shown(it) == {"one": "Healthy", "two": "Healthy"}


def test_the_card_that_a_pod_turns_out_to_have_is_kept_back_where_another_has_its_id() -> None:
    cards = [device(key, A, hardware=["slot"], identity=f"card {key}", unit=UNIT) for key in ("one", "two")]
    it = inventory(*cards)
    it.claim([held(A, "two", cards[0])])
    assert shown(it) == {"one": "held", "two": "replaced"}


def test_what_a_pod_has_by_another_resource_is_given_once_less() -> None:
    shared = device("kvm", A, ids=("kvm0", "kvm1"))
    it = Inventory([resource(A), resource("b.example/two")], {KIND: Fake(resource(A))})
    it.update(KIND, {"kvm": (shared,)})
    ours, theirs = held(A, "kvm0", shared), held("b.example/two", "f0", shared)
    it.claim([ours, theirs])
    assert shown(it) == {"kvm0": "Healthy", "kvm1": "held"}
    it.unclaim([theirs])
    assert shown(it) == {"kvm0": "Healthy", "kvm1": "Healthy"}


NODES = st.frozensets(st.integers(0, 4), min_size=1)
STEPS = st.lists(st.one_of(st.tuples(NODES, NODES), st.integers(0, 9), st.integers(0, 9)), max_size=12)
"""What is there now, or which ID is allocated, or (odd) which is given back."""


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_no_node_is_ever_given_to_two_pods_nor_changed_under_one(steps: list[tuple[frozenset[int], ...] | int]) -> None:
    it = inventory(*_bundles(frozenset(range(5)), frozenset(range(5))))
    claims: dict[str, Held] = {}
    for step in steps:
        if not isinstance(step, int):
            look(it, *_bundles(*step))
        elif step % 2 and claims:
            it.unclaim([claims.pop(sorted(claims)[step % len(claims)])])
        elif free := [slot for i, slot in it.slots(A).items() if slot.health.offered and i not in claims]:
            slot = free[step % len(free)]
            assert slot.device is not None
            assert not any(slot.device.hardware & claim.hardware for claim in claims.values())
            claims[slot.id] = held(A, slot.id, slot.device)
            it.claim([claims[slot.id]])
        for device_id, claim in claims.items():
            slot = it.slots(A)[device_id]
            assert not slot.health.offered or (slot.device is not None and slot.device.identity == claim.identity)
    it.unclaim(claims.values())
    assert all(slot.health.offered for slot in it.slots(A).values())


def _bundles(ttys: frozenset[int], videos: frozenset[int]) -> list[Device]:
    paths = [Matches([f"s{n}" for n in sorted(ttys)]), Matches([f"v{n}" for n in sorted(videos)])]
    made = []
    for bundle in pair(paths, [0, 1]):
        names = [name for name in bundle.members if name]
        made.append(lone(names[0], *names))
    return made
