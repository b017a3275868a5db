"""What is written is read back by `tomllib` as it was meant."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agent.config import syntax

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
_SCALARS = _TEXTS | st.integers(-(2**63), 2**63 - 1) | st.booleans()
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(_TEXTS, inner), max_leaves=10)


@given(_TEXTS, _VALUES)
def test_a_pair_means_what_was_meant(key: str, value: Any) -> None:
    assert tomllib.loads("\n".join(syntax.pair(key, value))) == {key: value}


@given(_TEXTS)
def test_a_comment_is_nothing_but_a_comment_and_keeps_its_width_where_words_allow(text: str) -> None:
    lines = list(syntax.comment(text))
    assert tomllib.loads("\n".join(lines)) == {}
    assert all(line.isprintable() and (len(line) <= 120 or " " not in line[2:]) for line in lines)


def test_quotes_backslashes_and_what_cannot_be_seen_are_escaped() -> None:
    assert list(syntax.pair("a b", 'x"\\\x1b\u202eé')) == ['"a b" = "x\\"\\\\\\u001b\\u202eé"']


def test_several_tables_have_a_line_each_and_one_does_not() -> None:
    assert list(syntax.pair("paths", [{"path": "/dev/a"}])) == ['paths = [{ path = "/dev/a" }]']
    assert list(syntax.pair("usb", [{"a": 1}, {"b": True}])) == [
        "usb = [",
        "    { a = 1 },",
        "    { b = true },",
        "]",
    ]
