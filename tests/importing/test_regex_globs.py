"""Regular expressions become names, and globs that take all that the expressions find."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.importing.readers import smarter
from backends.linux.globs import Glob


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
    assert sorted(smarter.names(expression) or ()) == names


@pytest.mark.parametrize("expression", ["fuse", "^fuse", "fuse$", "^tty[0-9]*$", "^a.$", "^[a-z][a-z]$", "^[^a]$"])
def test_a_pattern_of_many_names_is_not_written_out(expression: str) -> None:
    assert smarter.names(expression) is None


@pytest.mark.parametrize(
    ("expression", "globs"),
    [
        ("^ttyUSB[^/]*$", ["ttyUSB*"]),
        ("^video[0-9]+$", ["video*"]),
        ("^a[*]x/[0-9]b$", ["a[*]x/*"]),
        ("^input/event[0-9]*$", ["input/event*"]),
        ("^[ab]/c[^/]*$", ["*/*"]),
        ("^vcsm.*$", ["vcsm*", "vcsm*/*", "vcsm*/*/*", "vcsm*/*/*/*"]),
        ("^disk/by-id/.*$", ["disk/by-id/*", "disk/by-id/*/*"]),
        ("video", ["*", "*/*", "*/*/*", "*/*/*/*"]),
        ("^a|b$", ["*", "*/*", "*/*/*", "*/*/*/*"]),
    ],
)
def test_the_globs_of_an_expression(expression: str, globs: list[str]) -> None:
    assert list(smarter.globs(expression)) == globs


@pytest.mark.parametrize(
    "expression", ["[]--]", "a{999}", "[[:alpha:]]", "(?i)a", r"\pL", "a++", "(?=a)", "[", "[z-a]", r"(a)\1"]
)
def test_what_ours_and_go_do_not_read_alike_is_not_understood(expression: str) -> None:
    assert not smarter.is_understood(expression)


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
def test_names_and_globs_take_what_the_expression_finds(expression: str, examples: list[str]) -> None:
    names = smarter.names(expression)
    globs = [Glob(f"/dev/{glob}", pattern=expression) for glob in smarter.globs(expression)]
    for name in (*examples, *(names or ())):
        found = re.search(expression, name) is not None
        if names is not None:
            assert found == (name in names)
        if not any(part in ("", ".") or part.startswith(".") for part in name.split("/")):
            assert any(glob.takes(f"/dev/{name}") for glob in globs) == found
