"""Patterns of the configuration find what `re` finds, and no name keeps them long."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.interface.patterns import MOST_STEPS, Pattern, PatternError, complaint

_LEAVES = st.one_of(
    st.sampled_from(
        ["a", "b", "B", "0", ".", "-", "/", "ü", "{", "}", "]", "{}", "a{b", "[ab]", "[^a]", "[]a]", "[^]0-9]"]
    ),
    st.sampled_from(
        [
            r"\.",
            r"\d",
            r"\w",
            r"\W",
            r"\s",
            r"\x61",
            "\\141",
            r"\u0062",
            r"\n",
            r"[\]a\d]",
            "^",
            "$",
            r"\b",
            r"\B",
            r"\A",
            r"\Z",
        ]
    ),
)
_TIMES = ("", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{0}", "{1,2}", "{,2}", "{1,}", "{,}", "{0,2}?")
_EXPRESSIONS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, max_size=3).map("|".join),
        st.builds("{}{}{}){}".format, st.sampled_from(["(", "(?:"]), inner, st.just(""), st.sampled_from(_TIMES)),
        st.builds("{}{}".format, inner, st.sampled_from(_TIMES)),
    ),
    max_leaves=8,
)


def _found(expression: str, name: str) -> bool | None:
    try:
        return re.search(expression, name) is not None
    except re.error:
        return None


@given(
    st.sampled_from(["", "", "(?i)"]),
    _EXPRESSIONS,
    st.lists(st.text("abB0-./ü\n {}]", max_size=8), min_size=1, max_size=6),
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_pattern_finds_what_re_finds(flag: str, expression: str, names: list[str]) -> None:
    found = [_found(flag + expression, name) for name in names]
    if None in found:
        assert complaint(flag + expression) is not None
        return
    try:
        pattern = Pattern(flag + expression)
    except PatternError as error:
        assert "steps" in str(error) or re.search(r"[*+?}]\+", expression)  # noqa: PT017  # too long, or possessive
        return
    assert [pattern.is_in(name) for name in names] == found


class _Counted:
    """A matcher that counts how often it is asked."""

    asked = 0

    def __init__(self, matcher: re.Pattern[str]) -> None:
        self._matcher = matcher

    def match(self, name: str, at: int) -> re.Match[str] | None:
        _Counted.asked += 1
        return self._matcher.match(name, at)


@pytest.mark.parametrize(
    "expression",
    ["(a+)+$", "^(a|a)*$", "^(a|aa)+$", "(a*)*b", "^(.*)*x$", "^(([a-z])+.)+[A-Z]$", "(a?){30}a{30}c", "^((a*)*)*$"],
)
def test_no_name_takes_more_than_its_length_times_the_patterns(expression: str) -> None:
    pattern, name = Pattern(expression), "a" * 254 + "!"
    leaves = sum(matcher is not None for matcher, _ in pattern._steps)
    pattern._steps = [(matcher and _Counted(matcher), then) for matcher, then in pattern._steps]  # type: ignore[misc]
    _Counted.asked = 0
    assert not pattern.is_in(name)
    assert 0 < _Counted.asked <= leaves * (len(name) + 1) <= MOST_STEPS * 256


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        (r"(a)\1", r"\\1"),
        ("(?P<a>b)(?P=a)", "(?P="),
        ("a(?=b)", "(?=b"),
        ("a(?!b)", "(?!b"),
        ("(?<=a)b", "(?<="),
        ("(?<!a)b", "(?<!"),
        ("(?>a)", "(?>a"),
        ("a++b", "++b"),
        ("(a)?(?(1)b|c)", "(?(1"),
        ("(?x)a b", "(?x)"),
        ("(?i:a)", "(?i:"),
        ("a(?#b)", "(?#b"),
        ("a{330}", "320 steps"),
        ("(((a{99}){99}){99}){99}", "320 steps"),
        ("((((){65535}){65535}){65535}){65535}a{321}", "320 steps"),
        ("(", "is no regular expression"),
        ("[]--]", "is no regular expression"),
        ("(" * 5000 + ")" * 5000, "is no regular expression"),
    ],
)
def test_a_pattern_that_needs_more_is_refused_in_a_sentence(expression: str, what: str) -> None:
    assert what in (complaint(expression) or "")


def test_a_part_that_is_nothing_is_not_repeated_for_ever() -> None:
    assert Pattern("((((){65535}){65535}){65535})a").is_in("ba")
    assert Pattern("(?P<name>a|b)+$").is_in("cab")
