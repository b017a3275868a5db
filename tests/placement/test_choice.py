"""Placement: as good as exhaustive search on published and on random topologies; what it does with garbage."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.model import Health, Slot, State
from agent.placement.affinity import Company, survey
from agent.placement.choice import choose
from backends.base import Device, Link, Placement
from tests.placement.exhaustive import Exhaustive
from tests.placement.machines import MACHINES, Machine, Slots, all_linked, dgx1, dgx2, hgx_h100, l40s, mi210
from tests.work import work

DEAD = Health(State.UNHEALTHY, "xid-79", "it has fallen off the bus")
SLOW = Health(State.DEGRADED, "link-width", "its link is x8")


def chosen(
    machine: Machine,
    size: int,
    free: Sequence[str] | None = None,
    must: Sequence[str] = (),
    placement: Placement = "spread",
    replicas: int = 1,
) -> tuple[str, ...]:
    slots = machine.slots(replicas)
    return choose(slots, machine.links, placement, list(slots) if free is None else free, must, size)


def numbers(ids: Sequence[str]) -> list[int]:
    return [int(device_id[1:3]) for device_id in ids]


def g(*of: int) -> list[str]:
    return [f"g{number:02}" for number in of]


# --- as good as exhaustive search ---


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("busy", range(4))
def test_the_choice_is_as_good_as_exhaustive_search_on_a_published_machine(name: str, busy: int) -> None:
    machine = MACHINES[name]()
    slots, rng = machine.slots(), random.Random(busy)
    free = sorted(rng.sample(sorted(slots), len(slots) - busy * len(slots) // 8))
    oracle = Exhaustive(slots, machine.links, "spread", free)
    for size, best in enumerate(oracle.best_of_each_size()):
        found = choose(slots, machine.links, "spread", rng.sample(free, len(free)), (), size)
        assert len(set(found)) == size
        assert oracle.key(found) == best, f"{size} of {free}"


@pytest.mark.parametrize("name", MACHINES)
def test_what_must_be_included_is_and_the_rest_is_as_good_as_exhaustive_search(name: str) -> None:
    machine = MACHINES[name]()
    slots, rng = machine.slots(), random.Random(name)
    for size in (2, 3, 4, 5):
        free = sorted(rng.sample(sorted(slots), 8))
        must = rng.sample(free, rng.randrange(1, size))
        oracle = Exhaustive(slots, machine.links, "spread", free)
        found = choose(slots, machine.links, "spread", free, must, size)
        assert set(must) <= set(found)
        assert len(set(found)) == size
        assert oracle.key(found) == oracle.best(size, must)


@st.composite
def machines(draw: st.DrawFn, most: int = 8) -> Machine:
    """Trees of bridges with holes and contradictions in what is known, and any links."""
    bridges: list[tuple[str, ...]] = [("pci0000:00",), ("pci0000:80",)]
    for number in range(draw(st.integers(0, 6))):
        bridges.append((*draw(st.sampled_from(bridges)), f"b{number}"))
    places = st.tuples(st.sampled_from([*bridges, ()]), st.sampled_from([None, 0, 0, 1, 1]))
    slots = Slots()
    for ancestry, numa_node in draw(st.lists(places, min_size=1, max_size=most)):
        slots.device(ancestry, numa_node)
    keys = st.sampled_from([device.key for device in slots.found])
    links = st.builds(Link, keys, keys, st.integers(1, 3)).filter(lambda link: link.one != link.other)
    return Machine(slots.found, draw(st.lists(links, max_size=12)) if len(slots.found) > 1 else ())


@settings(deadline=None, max_examples=75)
@given(machines(), st.data())
def test_the_choice_is_as_good_as_exhaustive_search_on_any_topology(machine: Machine, data: st.DataObject) -> None:
    slots = machine.slots()
    free = data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True, min_size=1))
    must = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=2))
    size = data.draw(st.integers(len(must), len(free)))
    oracle = Exhaustive(slots, machine.links, "spread", free)
    found = choose(slots, machine.links, "spread", free, must, size)
    assert len(set(found)) == size
    assert oracle.key(found) == oracle.best(size, must)


@settings(deadline=None, max_examples=50)
@given(machines(most=4), st.integers(2, 3), st.sampled_from(["spread", "pack"]), st.data())
def test_shared_devices_are_placed_as_well_as_by_exhaustive_search(
    machine: Machine, replicas: int, placement: Placement, data: st.DataObject
) -> None:
    slots = machine.slots(replicas)
    free = data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True, min_size=1, max_size=9))
    must = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=2))
    size = data.draw(st.integers(len(must), len(free)))
    oracle = Exhaustive(slots, machine.links, placement, free)
    found = choose(slots, machine.links, placement, free, must, size)
    assert len(set(found)) == size
    assert oracle.key(found) == oracle.best(size, must)


@settings(deadline=None, max_examples=10)
@given(st.randoms(use_true_random=False))
def test_devices_linked_at_random_are_placed_as_well_as_by_exhaustive_search(rng: random.Random) -> None:
    slots = Slots()
    for number in range(12):
        slots.switch(1, number % 2)
    links = [Link(link.one, link.other, rng.randrange(4)) for link in all_linked(range(12), 1)]
    machine = Machine(slots.found, links)
    oracle = Exhaustive(machine.slots(), links, "spread", list(machine.slots()))
    for size, best in enumerate(oracle.best_of_each_size()):
        assert oracle.key(chosen(machine, size)) == best


# --- beside what the container has of other resources ---


@settings(deadline=None, max_examples=150)
@given(machines(most=6), st.booleans(), st.integers(1, 2), st.sampled_from(["spread", "pack"]), st.data())
def test_each_device_gets_its_own_neighbour_of_the_containers_other_resources_as_well_as_by_exhaustive_search(
    machine: Machine, linked: bool, replicas: int, placement: Placement, data: st.DataObject
) -> None:
    slots, mesh = machine.slots(replicas), machine.links
    if not linked:
        machine = Machine(machine.devices, all_linked(range(len(machine.devices)), data.draw(st.integers(0, 2))))
    places = st.tuples(st.sampled_from(machine.devices), st.integers(0, 2))
    company = [
        Company(
            [
                replace(device, key=f"{number}-{n}", ancestry=device.ancestry[: len(device.ancestry) - up])
                for n, (device, up) in enumerate(data.draw(st.lists(places, max_size=3)))
            ],
            given=given,
        )
        for number, given in enumerate(data.draw(st.lists(st.booleans(), max_size=2)))
    ]
    free = data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True, min_size=1, max_size=8))
    must = data.draw(st.lists(st.sampled_from(free), unique=True, max_size=2))
    size = data.draw(st.integers(len(must), len(free)))
    found = choose(slots, machine.links, placement, free, must, size, company)
    oracle = Exhaustive(slots, machine.links, placement, free, company)
    best = oracle.best(size, must)
    assert len(set(found)) == size
    assert set(must) <= set(found)
    if linked and mesh:
        first = len(oracle.first(found))
        assert oracle.key(found)[:first] == best[:first], "a mesh is not left for a neighbour"
    else:
        assert oracle.key(found) == best


def switches(*of: int) -> list[list[Device]]:
    """So many devices at each of some switches, by switch."""
    slots = Slots()
    for number in of:
        slots.switch(number, 0)
    devices = iter(slots.found)
    return [[next(devices) for _ in range(number)] for number in of]


@pytest.mark.parametrize(
    ("size", "beside", "expected"),
    [
        pytest.param(1, [], [4], id="alone: no whole switch is broken"),
        pytest.param(1, [0], [0], id="at the switch of the other device"),
        pytest.param(1, [1], [4], id="at its switch"),
        pytest.param(2, [1, 1], [0, 4], id="as many as there are at its switch"),
        pytest.param(2, [0, 1], [0, 4], id="one for each, not two that are near to each other"),
        pytest.param(2, [0, 0], [0, 1], id="both where both are"),
        pytest.param(2, [0], [0, 1], id="two for the one"),
        pytest.param(3, [0, 1], [0, 1, 4], id="one for each, and one more"),
        pytest.param(1, [0, 0, 1], [0], id="at the switch of most"),
    ],
)
def test_beside_devices_of_another_resource_a_container_gets(size: int, beside: list[int], expected: list[int]) -> None:
    (one, two) = switches(7, 4)
    adapters = Machine([*one[:4], *two[:1]]).slots()
    gpus = [(one[4:], two[1:])[switch][number] for number, switch in enumerate(beside)]
    ids = list(adapters)
    found = choose(adapters, (), "spread", ids, (), size, [Company(gpus)])
    assert found == tuple(ids[4 if number == 4 else number] for number in expected)


def test_an_adapter_that_is_asked_for_before_the_gpu_is_one_near_a_free_gpu() -> None:
    three = switches(3, 3, 3)
    adapters = Machine([device for switch in three for device in switch[:2]]).slots()
    free = [three[1][2], three[2][2]]
    found = choose(adapters, (), "spread", list(adapters), (), 2, [Company(free, given=False)])
    assert {adapters[it].device.ancestry[:-1] for it in found} == {gpu.ancestry[:-1] for gpu in free}  # type: ignore[union-attr]


def test_a_device_that_is_well_is_not_passed_over_for_a_sick_one_that_is_nearer() -> None:
    (one, two) = switches(2, 1)
    machine = Machine([one[0], two[0]])
    slots = machine.slots(health={one[0].key: SLOW})
    assert choose(slots, (), "spread", list(slots), (), 1, [Company([one[1]])]) == (two[0].key,)


# --- what that means on machines that are known ---


def two_switches() -> Machine:
    """Two devices at one and four at the other."""
    slots = Slots()
    slots.switch(2, 0)
    slots.switch(4, 0)
    return Machine(slots.found)


@pytest.mark.parametrize(
    ("make", "size", "free", "must", "expected"),
    [
        pytest.param(dgx1, 2, None, [], [2, 3], id="two with two links, at one switch"),
        pytest.param(dgx1, 2, None, [0], [0, 3], id="two with two links"),
        pytest.param(dgx1, 4, None, [], [0, 1, 2, 3], id="four of one socket, which are all linked"),
        pytest.param(dgx1, 4, [0, 1, 2, 4, 5, 6, 7], [], [4, 5, 6, 7], id="four of the other socket"),
        pytest.param(dgx2, 2, [1, 2, 4, 5, 8], [], [4, 5], id="of equal links, at one switch"),
        pytest.param(hgx_h100, 4, [0, 1, 2, 4, 5, 6, 7], [], [4, 5, 6, 7], id="of equal links, on one NUMA node"),
        pytest.param(mi210, 3, [0, 1, 4, 5, 6], [], [4, 5, 6], id="a hive is not left for a socket"),
        pytest.param(hgx_h100, 1, [0, 1, 2, 3, 6, 7], [], [6], id="one where the fewest are free"),
        pytest.param(l40s, 1, [0, 1, 2, 3, 4, 5, 7], [], [7], id="no whole switch is broken"),
        pytest.param(l40s, 2, [0, 1, 2, 3, 4, 5], [], [4, 5], id="no whole socket is broken"),
        pytest.param(two_switches, 1, [0, 1, 4, 5], [], [4], id="of as many free, the switch in use is used up"),
    ],
)
def test_on_a_machine_that_is_known_a_pod_gets(
    make: Callable[[], Machine], size: int, free: list[int] | None, must: list[int], expected: list[int]
) -> None:
    assert numbers(chosen(make(), size, None if free is None else g(*free), g(*must))) == expected


def test_virtual_functions_of_one_card_stay_together() -> None:
    slots = Slots()
    for numa_node in (0, 1):
        card = (f"pci0000:{numa_node:02}", slots.bridge())
        for _ in range(32):
            slots.device(card, numa_node)
    machine = Machine(slots.found)
    assert numbers(chosen(machine, 4)) == [0, 1, 2, 3]
    assert numbers(chosen(machine, 30, free=g(*range(4, 64)))) == [*range(32, 62)], "the first has but 28"
    assert numbers(chosen(machine, 28, free=g(*range(4, 64)))) == [*range(4, 32)]


# --- sharing ---


def test_spread_gives_the_device_with_the_most_free_replicas_and_each_once_in_a_pod() -> None:
    machine = l40s()
    free = [f"{key}::{n}" for key in g(0, 1, 2, 3) for n in range(4)]
    assert numbers(chosen(machine, 4, free, replicas=4)) == [0, 1, 2, 3]
    held = free.pop(), free.pop(0)
    assert {"g03", "g00"} == {device_id[:3] for device_id in held}
    assert numbers(chosen(machine, 1, free, replicas=4)) == [1]
    assert numbers(chosen(machine, 2, free, replicas=4)) == [1, 2]
    assert Counter(numbers(chosen(machine, 6, free, replicas=4))) == {0: 1, 1: 2, 2: 2, 3: 1}


def test_pack_fills_the_device_with_the_fewest_free_replicas() -> None:
    machine = l40s()
    free = [f"{key}::{n}" for key in g(0, 1, 2, 3) for n in range(4) if (key, n) != ("g02", 0)]
    assert numbers(chosen(machine, 1, free, placement="pack", replicas=4)) == [2]
    assert numbers(chosen(machine, 3, free, placement="pack", replicas=4)) == [2, 2, 2]
    assert numbers(chosen(machine, 4, free, placement="pack", replicas=4)) == [3, 3, 3, 3], "beside the broken one"


def test_what_must_be_included_counts_when_devices_are_spread() -> None:
    free = [f"{key}::{n}" for key in g(0, 1) for n in range(2)]
    assert chosen(l40s(), 2, free, must=["g00::1"], replicas=2) == ("g00::1", "g01::0")


def test_a_pod_gets_another_device_even_if_that_leaves_them_less_even() -> None:
    free = ["g00::1", "g00::2", "g01::0"]
    assert chosen(l40s(), 2, free, must=["g00::0"], replicas=3) == ("g00::0", "g01::0")


# --- health, and requests that make no sense ---


def test_a_dead_device_breaks_its_group_though_the_kubelet_calls_it_free() -> None:
    slots = l40s().slots(health={"g03": DEAD})
    assert choose(slots, (), "spread", list(slots), (), 1) == ("g02",)


def test_one_dead_gpu_does_not_fail_the_choice_for_all() -> None:
    machine = dgx1()
    slots = machine.slots(health={"g01": DEAD})
    assert numbers(choose(slots, machine.links, "spread", list(slots), (), 4)) == [4, 5, 6, 7]
    slots["g05"] = Slot("g05", None, DEAD)  # a tombstone
    del slots["g06"]
    assert 5 not in numbers(choose(slots, machine.links, "spread", g(*range(8)), (), 5))
    assert len(choose(slots, machine.links, "spread", g(*range(8)), (), 8)) == 8


def test_unhealthy_devices_are_chosen_only_when_nothing_else_is_left() -> None:
    machine = hgx_h100()
    slots = machine.slots(health={"g00": DEAD, "g01": SLOW, "g04": SLOW})
    free = [*slots, "GPU-unknown"]
    for size in range(6):
        assert not {"g00", "g01", "g04", "GPU-unknown"} & set(choose(slots, (), "spread", free, (), size))
    assert choose(slots, (), "spread", free, (), 6)[-1] == "g04", "near more of the others than g01"
    assert "g00" not in choose(slots, (), "spread", free, (), 7)
    assert choose(slots, (), "spread", free, (), 9)[-2:] == ("g00", "GPU-unknown")


def test_what_must_be_included_comes_first_whatever_it_is() -> None:
    machine = hgx_h100()
    slots = machine.slots(health={"g05": DEAD})
    assert choose(slots, (), "spread", g(0, 1, 5), ["unknown", "g05", "g05"], 4) == ("unknown", "g05", "g00", "g01")
    assert choose(slots, (), "spread", g(0, 1), ["g07"], 2) == ("g07", "g00")
    assert choose(slots, (), "spread", g(0, 1), ["g07", "g06", "g05"], 2) == ("g07", "g06")


def test_nothing_at_all_is_no_error() -> None:
    assert choose({}, (), "spread", (), (), 3) == ()
    assert choose({}, (), "pack", ["b", "a", "b"], (), 1) == ("a",)


def test_links_that_make_no_sense_are_passed_over() -> None:
    machine = l40s()
    odd = [Link("g00", "g00", 9), Link("g00", "gone", 9), Link("g01", "g02", 0), Link("g01", "g02", -5)]
    assert choose(machine.slots(), odd, "spread", g(0, 1, 2), (), 2) == ("g00", "g01")


def test_a_pair_that_both_devices_name_is_linked_once() -> None:
    machine = l40s()
    links = [Link("g00", "g02", 1), Link("g02", "g00", 1), Link("g00", "g04", 2)]
    assert numbers(choose(machine.slots(), links, "spread", list(machine.slots()), (), 2)) == [0, 4]


ids = st.sampled_from([*g(0, 1, 2, 3, 9), "g00::1", "", "GPU-é"])


@settings(deadline=None)
@given(
    machines(most=5),
    st.lists(ids),
    st.lists(ids),
    st.integers(-3, 12),
    st.sampled_from(["spread", "pack"]),
    st.dictionaries(ids, st.sampled_from([DEAD, SLOW])),
)
def test_any_request_gets_an_answer_in_valid_form(
    machine: Machine,
    free: list[str],
    must: list[str],
    size: int,
    placement: Placement,
    health: dict[str, Health],
) -> None:
    found = choose(machine.slots(health=health), machine.links, placement, free, must, size)
    assert len(found) == len(set(found)) == min(max(size, 0), len({*free, *must}))
    assert set(found) <= {*free, *must}
    assert set(must) <= set(found) or size < len(set(must))


@settings(max_examples=20)
@given(st.randoms(use_true_random=False))
def test_the_order_of_the_request_does_not_matter(rng: random.Random) -> None:
    machine = dgx1()
    free = list(machine.slots())
    expected = [chosen(machine, size) for size in range(9)]
    rng.shuffle(free)
    assert [chosen(machine, size, free) for size in range(9)] == expected


# --- large pools ---


@pytest.mark.parametrize("size", [1, 8, 500, 999])
def test_a_thousand_devices_are_placed_without_delay(size: int) -> None:
    slots = Slots()
    for number in range(250):
        slots.switch(4, number % 4)
    machine = Machine(slots.found)
    found = chosen(machine, size)
    assert len(found) == size
    switches = Counter(device.ancestry[:-1] for device in machine.devices if device.key in found)
    assert sum(count < 4 for count in switches.values()) <= 1, "no switch is broken without need"


def test_more_links_than_can_be_looked_at_are_left_out_of_account() -> None:
    slots = Slots()
    for number in range(200):
        slots.switch(2, number % 2)
    machine = Machine(slots.found, all_linked(range(0, 400, 2), 1))
    assert numbers(chosen(machine, 2)) == [0, 1]


def test_the_search_among_twenty_gpus_linked_at_random_is_cut_short() -> None:
    rng = random.Random(0)
    slots = Slots()
    for _ in range(20):
        slots.device((), None)
    machine = Machine(slots.found, [Link(a.one, a.other, rng.randrange(1, 200)) for a in all_linked(range(20), 1)])
    for size in (5, 10):
        assert work(partial(chosen, machine, size)) < 4_000_000, "up to 184,756 choices of some 100 byte-codes each"


def test_a_device_that_two_units_name_alike_is_two_devices() -> None:
    twins = [Device("x", unit, frozenset({f"hw:{unit}"}), numa_node=0) for unit in ("a", "b")]
    slots = {device.unit: Slot(device.unit, device, Health(State.HEALTHY)) for device in twins}
    assert choose(slots, (), "spread", ["a", "b"], (), 1) == ("a",)


def test_a_link_between_gpus_is_one_between_their_parts() -> None:
    parts = [
        Device(f"part-{gpu}-{n}", gpu, frozenset({f"part:{gpu}-{n}"}), depends=frozenset({gpu}), numa_node=0)
        for gpu in ("pci:a", "pci:b", "pci:c")
        for n in (1, 2)
    ]
    topology, _ = survey(parts, [Link("pci:a", "pci:c", 2)])
    assert {other for other, weight in topology.links[0].items() if weight == 2} == {4, 5}
    assert 2 not in topology.links
