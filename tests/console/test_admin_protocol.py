"""What is sent over the admin socket arrives as it was, also between different versions."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.console import control, views
from agent.console.control import Codec

MESSAGES: tuple[Any, ...] = (
    views.Status,
    views.Event,
    views.Explanation,
    views.History,
    views.Drained,
    views.Undrained,
    views.Reloaded,
    views.HandedOver,
    control.EmptyRequest,
    control.WatchRequest,
    control.DeviceRequest,
    control.DrainRequest,
)

_SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=8),
    bool: st.booleans(),
    int: st.integers(0, 2**31 - 1),
    float: st.floats(0, 2e9),
}


def _built(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a view's type: every field is drawn, none left to its default."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.builds(hint, **{name: _built(inner) for name, inner in get_type_hints(hint).items()})
    match get_origin(hint), get_args(hint):
        case builtins.tuple, (item, _):
            return st.lists(_built(item), max_size=2).map(tuple)
        case _, (_, value) if get_origin(hint) is Mapping:
            return st.dictionaries(st.text(min_size=1, max_size=8), _built(value), max_size=2)
        case _, choices:
            return st.one_of([st.none() if choice is type(None) else _built(choice) for choice in choices])


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_arrives_as_it_was_sent(kind: Any) -> None:
    @settings(max_examples=20)
    @given(_built(kind))
    def arrives(message: Any) -> None:
        assert Codec().decode(Codec().encode(message, kind), kind) == message

    arrives()


@pytest.mark.parametrize("gift", [None, views.Gift()], ids=["not offered", "offered with nothing"])
def test_a_gift_of_nothing_is_not_no_gift(gift: views.Gift | None) -> None:
    sent = views.Explanation("k", "b", "u", gift=gift)
    assert Codec().decode(Codec().encode(sent, type(sent)), views.Explanation).gift == gift


def test_what_a_newer_daemon_adds_is_left_out_and_what_an_older_one_lacks_has_its_default() -> None:
    newer = msgspec.json.encode({"ids": ["a"], "ended": [], "words": "new", "number": 1.5})
    assert Codec().decode(newer, views.Undrained) == views.Undrained(("a",), ())
    older = msgspec.json.encode({"ids": ["a"], "held": []})
    assert Codec().decode(older, views.Drained) == views.Drained(("a",), ())


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.binary(max_size=40))
def test_garbage_is_a_message_or_refused(kind: Any, data: bytes) -> None:
    with suppress(msgspec.DecodeError):
        Codec().decode(data, kind)


def test_a_file_name_that_is_no_text_spoils_no_answer() -> None:
    sent = views.Problem("chardev", "/dev/\udcff", "it cannot be read")
    arrived = Codec().decode(Codec().encode(sent, type(sent)), views.Problem)
    assert arrived == views.Problem("chardev", "/dev/?", "it cannot be read")
