"""The pure parts, whatever they are given."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.simulation import checkpoint
from agent.simulation.checkpoint import Allocation, PodDevices
from agent.simulation.device_manager import begin, listed, lost
from agent.simulation.model import Change, Kind, ResourceView

IDS = st.text("abcdef", min_size=1, max_size=2)
HEALTH = st.sampled_from(["Healthy", "Unhealthy", "healthy", ""])
NODES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
quick = settings(deadline=None, max_examples=50)
LISTS = st.lists(st.tuples(IDS, HEALTH, NODES), max_size=12)


@quick
@given(LISTS)
def test_a_list_counts_entries_and_its_loss_keeps_capacity(devices: list[tuple[str, str, tuple[int, ...]]]) -> None:
    resource = listed("r", devices)
    assert resource.view.capacity == len(devices)
    assert resource.view.allocatable == sum(health == "Healthy" for _, health, _ in devices)
    gone = lost(resource).view
    assert (gone.capacity, gone.allocatable, gone.healthy) == (len(devices), 0, frozenset())
    assert gone.unhealthy == {device for device, _, _ in devices}


@quick
@given(LISTS, LISTS)
def test_the_devices_of_a_change_lead_from_before_to_after(
    first: list[tuple[str, str, tuple[int, ...]]], second: list[tuple[str, str, tuple[int, ...]]]
) -> None:
    before, after = listed("r", first).view, listed("r", second).view
    changed = Change(Kind.LIST, "r", before=before, after=after).devices()
    known = (before.healthy | before.unhealthy | changed.keys()) - {i for i, h in changed.items() if h == "gone"}
    assert known == after.healthy | after.unhealthy
    assert {i for i, h in changed.items() if h == "gone"}.isdisjoint(known)


@quick
@given(
    healthy=st.frozensets(IDS, min_size=1, max_size=8),
    used=st.frozensets(IDS, max_size=4),
    reusable=st.frozensets(IDS, max_size=4),
    preferred=st.frozensets(IDS, max_size=8),
    count=st.integers(1, 8),
    seed=st.integers(0, 100),
)
def test_a_choice_has_the_size_asked_for_reuses_first_and_takes_nothing_in_use(
    healthy: frozenset[str],
    used: frozenset[str],
    reusable: frozenset[str],
    preferred: frozenset[str],
    count: int,
    seed: int,
) -> None:
    rng = random.Random(seed)
    count = min(count, len(reusable) + len(healthy - used - reusable)) or 1
    if not (reusable or healthy - used):
        return
    choice = begin("r", count, healthy=healthy, in_use=used, reusable=reusable, rng=rng)
    chosen = choice.finish(preferred, rng)
    assert len(chosen) == count
    assert len(chosen & reusable) >= min(count, len(reusable))
    fresh = chosen - reusable
    assert fresh <= healthy - used
    if fresh - preferred:
        assert choice.free & preferred <= chosen


@quick
@given(
    st.dictionaries(
        st.tuples(IDS, IDS, IDS),
        st.builds(Allocation, st.dictionaries(st.integers(-1, 3), st.lists(IDS, min_size=1).map(tuple)), st.binary()),
        max_size=5,
    ),
    st.dictionaries(IDS, st.lists(IDS), max_size=3),
)
def test_a_checkpoint_gives_back_what_was_written(
    entries: dict[tuple[str, str, str], Allocation], healthy: dict[str, list[str]]
) -> None:
    assert checkpoint.decode(checkpoint.encode(entries, healthy)) == (entries, tuple(healthy))


def test_pods_that_are_not_kept_hold_nothing() -> None:
    held = PodDevices({("u1", "c", "r"): Allocation({0: ("a",)}, b""), ("u2", "c", "r"): Allocation({0: ("b",)}, b"")})
    assert held.in_use("r") == {"a", "b"}
    held.keep_only({"u2"})
    assert held.in_use("r") == {"b"}
    assert held.in_use("other") == frozenset()


def test_a_device_with_two_numa_nodes_stands_under_both() -> None:
    resource = listed("r", [("a", "Healthy", (0, 1)), ("b", "Healthy", ())])
    assert resource.by_node(["a", "b"]) == {0: ("a",), 1: ("a",), -1: ("b",)}


def test_a_change_without_a_resource_has_no_devices() -> None:
    assert Change(Kind.STARTED).devices() == {}
    assert Change(Kind.LIST, "r", after=ResourceView("r", 1, 1, frozenset({"a"}))).devices() == {"a": "Healthy"}
