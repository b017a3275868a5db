"""Regular expressions become names and globs only where these take the same names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.importing.patterns import parse
from backends.linux.globs import Glob, is_glob


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("^fuse$", ["fuse"]),
        (r"^i2c\-1$", ["i2c-1"]),
        ("^net/tun$", ["net/tun"]),
        ("^rtc0?$", ["rtc", "rtc0"]),
        ("^ttyUSB[0-2]$", ["ttyUSB0", "ttyUSB1", "ttyUSB2"]),
        (r"^hci\d$", [f"hci{n}" for n in range(10)]),
        ("^x[ab]{2}$", ["xaa", "xab", "xba", "xbb"]),
        (r"^video\.0$", ["video.0"]),
    ],
)
def test_a_pattern_of_few_names_is_these_names(expression: str, names: list[str]) -> None:
    pattern = parse(expression)
    assert pattern is not None
    assert pattern.names() is not None
    assert sorted(pattern.names() or ()) == names


@pytest.mark.parametrize("expression", ["fuse", "^fuse", "fuse$", "^tty[0-9]*$", "^a.$", "^[a-z][a-z]$", "^[^a]$"])
def test_a_pattern_of_many_names_is_not_written_out(expression: str) -> None:
    pattern = parse(expression)
    assert pattern is not None
    assert pattern.names() is None


@pytest.mark.parametrize(
    ("expression", "glob", "same"),
    [
        ("^ttyUSB[^/]*$", "ttyUSB*", True),
        ("^ttyUSB[^/]+$", "ttyUSB?*", True),
        ("^tty[a-z][0-9]$", "tty[a-z][0-9]", True),
        ("^tty[^/0-9][0-9]$", "tty[!0-9][0-9]", True),
        (r"^a\*[a-z]{2}$", "a[*][a-z][a-z]", True),
        ("^video[0-9]*$", "video[0-9]*", False),
        ("^video[0-9]+$", "video[0-9]*", False),
        ("^vcsm.*$", "vcsm*", False),
        ("^a.b$", "a?b", False),
        ("^tty[^0-9]$", "tty[!0-9]", False),
        ("^[^/]*$", "*", False),
        ("^net/[^/]*$", "net/*", False),
        ("^[ab]/c[^/]*$", "[ab]/c*", False),
        ("video", "*video*", False),
        ("^ttyUSB", "ttyUSB*", False),
        ("^x[a-z]?$", "x[a-z]*", False),
        ("^x[-a-z]$", "x?", False),
    ],
)
def test_the_nearest_glob_and_whether_it_means_the_same(expression: str, glob: str, same: bool) -> None:
    pattern = parse(expression)
    assert pattern is not None
    assert pattern.glob() == (glob, same)


@pytest.mark.parametrize(
    "expression", ["(a|b)", "^a|b$", r"\w", r"\bfuse", "a**", "a{3,1}", "[z-a]", "[[:alpha:]]", "(?i)a", "a$b", "["]
)
def test_what_is_more_involved_is_not_understood(expression: str) -> None:
    assert parse(expression) is None


_ATOMS = st.sampled_from(
    ["a", "b", "0", r"\.", "[a-c]", "[0-9]", "[^/]", "[^a/]", "[^b]", ".", "/", r"\d", "-", "[.a]"]
)
_TIMES = st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{1,2}", "{1,}"])
_EXPRESSIONS = st.builds(
    lambda starts, pieces, ends: starts + "".join(a + t for a, t in pieces) + ends,
    st.sampled_from(["^", "^", ""]),
    st.lists(st.tuples(_ATOMS, _TIMES), min_size=1, max_size=4),
    st.sampled_from(["$", "$", ""]),
)
_NAMES = st.lists(st.text("ab0.-c9", min_size=1, max_size=4), min_size=1, max_size=2).map("/".join)


@given(_EXPRESSIONS, st.lists(_NAMES, max_size=20))
def test_names_and_exact_globs_take_what_the_expression_takes(expression: str, examples: list[str]) -> None:
    pattern = parse(expression)
    assert pattern is not None
    names, (glob, same) = pattern.names(), pattern.glob()
    for name in (*examples, *(names or ())):
        taken = re.search(expression, name) is not None
        if names is not None:
            assert taken == (name in names)
        if same:
            path = f"/dev/{name}"
            assert taken == (Glob(f"/dev/{glob}").takes(path) if is_glob(glob) else path == f"/dev/{glob}")
