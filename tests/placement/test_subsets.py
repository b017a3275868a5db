"""The best subset of nested groups and webs, against looking at everything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.placement import subsets
from agent.placement.affinity import LINKED_MOST, SAME, Group, Part, Web, clusters, survey
from agent.placement.subsets import EXACT, Member, Search, best
from backends.base import Link
from tests.placement.machines import MACHINES, Machine, Slots, all_linked, dgx1, dgx2, hgx_h100, l40s, mi250x

Tables = list[list[int]]


@st.composite
def parts(draw: st.DrawFn, most_slots: int = 3) -> tuple[Tables, Tables]:
    """Their tables, and what slots of two parts are worth together; numbers as large as the real ones."""
    number = draw(st.integers(1, 5))
    scale = draw(st.sampled_from([1, 1 << 60]))
    tables = [[0, *draw(st.lists(st.integers(-50, 50), min_size=1, max_size=most_slots))] for _ in range(number)]
    weights = [[0] * number for _ in range(number)]
    for one, other in combinations(range(number), 2):
        weights[one][other] = weights[other][one] = scale * draw(st.integers(0, 9))
    return [[scale * value for value in table] for table in tables], weights


def worth(tables: Tables, weights: Tables, counts: Sequence[int]) -> int:
    pairs = sum(counts[a] * counts[b] * weights[a][b] for a, b in combinations(range(len(counts)), 2))
    return pairs + sum(table[count] for table, count in zip(tables, counts, strict=True))


def best_of(tables: Tables, weights: Tables, size: int) -> int:
    every = product(*(range(len(table)) for table in tables))
    return max(worth(tables, weights, counts) for counts in every if sum(counts) == size)


@settings(deadline=None)
@given(parts())
def test_a_search_finds_the_best_of_every_size(found: tuple[Tables, Tables]) -> None:
    tables, weights = found
    for size in range(sum(map(len, tables)) - len(tables) + 1):
        value, counts = Search(tables, weights).best(size)
        assert sum(counts) == size
        assert value == worth(tables, weights, counts) == best_of(tables, weights, size)


def at_random(parts: int, slots: int, seed: int, most: int = 100) -> tuple[Tables, Tables]:
    rng = random.Random(seed)
    weights = [[0] * parts for _ in range(parts)]
    for one, other in combinations(range(parts), 2):
        weights[one][other] = weights[other][one] = rng.randrange(100)
    return [[0, *(rng.randrange(most) for _ in range(slots))] for _ in range(parts)], weights


def test_a_small_search_goes_on_until_the_best_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subsets, "_EFFORT", 0)
    for seed in range(20):
        tables, weights = at_random(10, 1, seed)
        assert Search(tables, weights).best(5)[0] == best_of(tables, weights, 5)


@pytest.mark.parametrize("seed", [7, 8, 11])  # where to take the best one at a time is not enough
def test_a_large_search_ends_with_something_that_no_exchange_betters(seed: int) -> None:
    tables, weights = at_random(60, 3, seed, most=3000)
    value, counts = Search(tables, weights).best(40)
    assert (sum(counts), value) == (40, worth(tables, weights, counts))
    for given_, taken in product(range(60), range(60)):
        if counts[given_] and counts[taken] < 3 and given_ != taken:
            other = [*counts]
            other[given_] -= 1
            other[taken] += 1
            assert worth(tables, weights, other) <= value


def test_a_large_search_is_nearly_always_the_best_all_the_same() -> None:
    tables, weights = at_random(EXACT + 1, 1, seed=2)
    every = ([number in chosen for number in range(EXACT + 1)] for chosen in combinations(range(EXACT + 1), 4))
    assert Search(tables, weights).best(4)[0] == max(worth(tables, weights, counts) for counts in every)


# --- groups ---


def members(part: Part) -> list[int]:
    return [part] if isinstance(part, int) else [number for one in part.parts for number in members(one)]


def webs(part: Part) -> int:
    """How many of the parts within are webs."""
    return 0 if isinstance(part, int) else isinstance(part, Web) + sum(webs(one) for one in part.parts)


def assert_true(machine: Machine, part: Part) -> None:
    """Whatever the groups say of two devices is so."""
    topology, _ = survey(machine.devices, machine.links)
    if isinstance(part, int):
        return
    for (a, one), (b, other) in combinations(enumerate(part.parts), 2):
        said = part.affinity if isinstance(part, Group) else part.affinities[a][b]
        assert {topology.affinity(x, y) for x, y in product(members(one), members(other))} == {said}
    for one in part.parts:
        assert_true(machine, one)


@pytest.mark.parametrize("name", MACHINES)
def test_the_groups_of_a_published_machine_are_true(name: str) -> None:
    machine = MACHINES[name]()
    part = clusters(survey(machine.devices, machine.links)[0], range(len(machine.devices)))
    assert sorted(members(part)) == list(range(len(machine.devices)))
    assert_true(machine, part)


@given(st.randoms(use_true_random=False))
def test_the_groups_of_any_machine_are_true(rng: random.Random) -> None:
    slots = Slots()
    for _ in range(3):
        slots.switch(2, rng.randrange(2))
    links = [link for link in all_linked(range(6), rng.randrange(1, 3)) if rng.randrange(3)]
    machine = Machine(slots.found, links)
    part = clusters(survey(machine.devices, links)[0], range(6))
    assert sorted(members(part)) == list(range(6))
    assert_true(machine, part)


def test_only_what_no_group_describes_is_a_web() -> None:
    found = {make.__name__: make() for make in (dgx1, dgx2, hgx_h100, l40s, mi250x)}
    counted = {
        name: webs(clusters(survey(machine.devices, machine.links)[0], range(len(machine.devices))))
        for name, machine in found.items()
    }
    assert counted == {"dgx1": 1, "dgx2": 0, "hgx_h100": 0, "l40s": 0, "mi250x": 2}


def test_twins_in_a_web_are_one_part_of_it() -> None:
    slots = Slots()
    for number in range(4):
        for _ in range(3):
            slots.device((f"pci0000:{number:02}", slots.bridge()), 0)
    path = [(0, 1), (1, 2), (2, 3)]  # of boards, which makes a web
    links = [Link(f"g{3 * a + x:02}", f"g{3 * b + y:02}", 1) for a, b in path for x, y in product(range(3), range(3))]
    part = clusters(survey(slots.found, links)[0], range(12))
    assert isinstance(part, Web)
    assert [len(members(one)) for one in part.parts] == [3, 3, 3, 3]


def test_the_links_of_very_many_devices_are_left_out_of_account() -> None:
    slots = Slots()
    for _ in range(LINKED_MOST + 1):
        slots.device((), None)
    topology, _ = survey(slots.found, [Link("g00", "g01", 1)])
    assert isinstance(clusters(topology, range(LINKED_MOST)), Group)
    assert clusters(topology, range(LINKED_MOST + 1)) == Group(10, tuple(range(LINKED_MOST + 1)))


def test_what_a_slot_is_worth_to_all_others_is_the_sum_of_its_pairs() -> None:
    for make in MACHINES.values():
        machine = make()
        topology, _ = survey(machine.devices, machine.links)
        every = range(len(machine.devices))
        slots = [number % 3 for number in every]
        expected = [sum(slots[other] * topology.affinity(one, other) for other in every) for one in every]
        assert topology.towards(slots) == expected
    assert topology.affinity(0, 0) == SAME


def test_single_members_of_a_group_are_taken_by_their_worth() -> None:
    of = {number: Member(1, single) for number, single in enumerate([3, 1, 4, 1, 5])}
    assert best(Group(10, (0, 1, 2, 3, 4)), of, 1, 2) == {4: 1, 2: 1}
    assert best(0, {0: Member(7, 1)}, 1, 3) == {0: 3}


def test_what_is_gained_across_groups_is_gained_with_each_slot() -> None:
    of = {number: Member(1, 0) for number in range(4)}
    groups = Group(10, (Group(50, (0, 1)), Group(50, (2, 3))))
    assert best(groups, of, 1, 2, {frozenset({1, 2}): [0, 1000, 1000]}) == {1: 1, 2: 1}
    assert best(groups, of, 1, 2, {frozenset({2, 3}): [0, 9, 9], frozenset({0}): [0, 10, 10]}) == {0: 1, 1: 1}
