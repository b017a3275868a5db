from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.chardev.bundles import Bundle, Matches, pair


def members(*paths: Matches[str]) -> list[tuple[str | None, ...]]:
    return [bundle.members for bundle in pair(paths, range(len(paths)))]


def name(bundle: Bundle[str]) -> tuple[str | None, ...]:
    """What its ID says of it."""
    return tuple(bundle.members[k] for k in bundle.named)


# --- generic-device-plugin's own examples, and the words of its options ---


@pytest.mark.parametrize(
    ("paths", "bundles"),
    [
        ([Matches(["simple"])], [("simple",)]),
        ([Matches(["tty0", "tty1", "tty2", "tty3"])], [("tty0",), ("tty1",), ("tty2",), ("tty3",)]),
        ([Matches([]), Matches(["exists"])], []),
        ([Matches(["pcmC0D0c"]), Matches(["controlC0"])], [("pcmC0D0c", "controlC0")]),
        # "if one path matches 5 devices and another 1 with a limit of 10, the group provides 5 pairs"
        ([Matches(list("abcde")), Matches(["one"], limit=10)], [(device, "one") for device in "abcde"]),
        ([Matches(list("abcde")), Matches(["one"], limit=3)], [(device, "one") for device in "abc"]),
        ([Matches(["tty0", "tty1"]), Matches(["video0", "video1"])], [("tty0", "video0"), ("tty1", "video1")]),
        ([Matches(["tty0", "tty1"]), Matches(["video0"])], [("tty0", "video0")]),
        ([Matches(list("abcd")), Matches(["x", "y"], limit=2)], [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y")]),
        ([Matches(["tty0"]), Matches([], optional=True)], [("tty0", None)]),
        ([Matches(["tty0", "tty1"]), Matches(["led"], optional=True)], [("tty0", "led")]),
        ([Matches(["a", "b"], limit=2), Matches(["x"], limit=3)], [("a", "x"), ("b", "x")]),
        ([Matches(["tty0", "tty1"], limit=5)], [("tty0",), ("tty1",)]),
        ([Matches([], optional=True)], []),
        ([Matches([], optional=True), Matches([], optional=True)], []),
        ([Matches(["fuse"], limit=10)], [("fuse",)]),
        ([], []),
    ],
)
def test_bundles_are_paired_as_generic_device_plugin_does(
    paths: list[Matches[str]], bundles: list[tuple[str | None, ...]]
) -> None:
    assert members(*paths) == bundles


SETS = st.lists(
    st.tuples(st.sets(st.integers(0, 9), max_size=5), st.integers(1, 4), st.booleans()), min_size=1, max_size=4
)


def made(sets: list[tuple[set[int], int, bool]]) -> list[Matches[str]]:
    """Paths of which no two match the same."""
    return [
        Matches([f"{k}/{entry}" for entry in sorted(found)], limit, optional)
        for k, (found, limit, optional) in enumerate(sets)
    ]


@given(SETS)
def test_the_rule_is_that_of_the_reference(sets: list[tuple[set[int], int, bool]]) -> None:
    paths = made(sets)
    counting = [path for path in paths if not path.optional or path.found]
    repeated = [[*path.found] * path.limit for path in paths]
    length = 0
    if counting and all(path.found for path in counting):
        length = min(
            max(len(path.found) for path in counting),
            min(len(path.found) * path.limit for path in counting),
        )
    expected = [tuple(entries[i] if entries else None for entries in repeated) for i in range(length)]
    assert members(*paths) == expected


@given(SETS, st.permutations(range(4)))
def test_no_two_bundles_have_one_name(sets: list[tuple[set[int], int, bool]], order: list[int]) -> None:
    paths = made(sets)
    names = [name(bundle) for bundle in pair(paths, [k for k in order if k < len(paths)])]
    assert len(set(names)) == len(names)


@given(SETS, st.data())
def test_a_bundle_that_holds_the_same_keeps_its_name_whatever_else_comes_or_goes(
    sets: list[tuple[set[int], int, bool]], data: st.DataObject
) -> None:
    other = [(data.draw(st.sets(st.integers(0, 9), max_size=5)), limit, optional) for _, limit, optional in sets]
    before, after = (pair(made(version), range(len(sets))) for version in (sets, other))
    names = {bundle.members: {name(b) for b in before if b.members == bundle.members} for bundle in before}
    for bundle in after:
        if bundle.members in names:
            assert name(bundle) in names[bundle.members]


@given(SETS, st.data())
def test_a_name_always_means_a_bundle_with_what_it_is_named_after(
    sets: list[tuple[set[int], int, bool]], data: st.DataObject
) -> None:
    other = [(data.draw(st.sets(st.integers(0, 9), max_size=5)), limit, optional) for _, limit, optional in sets]
    before = {name(bundle): bundle for bundle in pair(made(sets), range(len(sets)))}
    for bundle in pair(made(other), range(len(sets))):
        if (same := before.get(name(bundle))) is not None:
            assert set(name(bundle)) <= set(same.members) & set(bundle.members)


@given(st.sets(st.integers(0, 9), max_size=8), st.sets(st.integers(0, 9), max_size=8), st.integers(2, 12))
def test_with_one_node_for_all_no_bundle_ever_changes(before: set[int], after: set[int], limit: int) -> None:
    def bundles(found: set[int]) -> dict[tuple[str | None, ...], tuple[str | None, ...]]:
        tty = Matches([f"tty{n}" for n in sorted(found)])
        return {name(b): b.members for b in pair([Matches(["fuse"], limit), tty], [0, 1])}

    one, two = bundles(before), bundles(after)
    assert all(one[key] == two[key] for key in one.keys() & two.keys())
