"""Views and the messages of the .proto, as betterproto writes and reads them, say the same."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.console import requests, views
from agent.console.messages import decode, encode
from agent.kubelet.protobuf import MalformedError
from tests.console.api.fairlead.admin import v1

PAIRS: dict[Any, Any] = {
    views.Status: v1.StatusResponse,
    views.Event: v1.Event,
    views.Explanation: v1.Explanation,
    views.History: v1.HistoryResponse,
    views.Drained: v1.DrainResponse,
    views.Undrained: v1.UndrainResponse,
    views.Reloaded: v1.ReloadResponse,
    requests.StatusRequest: v1.StatusRequest,
    requests.WatchRequest: v1.WatchRequest,
    requests.ExplainRequest: v1.ExplainRequest,
    requests.HistoryRequest: v1.HistoryRequest,
    requests.DrainRequest: v1.DrainRequest,
    requests.UndrainRequest: v1.UndrainRequest,
    requests.ReloadRequest: v1.ReloadRequest,
}

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


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
def test_a_view_survives_the_wire_also_by_way_of_betterproto(kind: Any) -> None:
    @settings(max_examples=20)
    @given(_built(kind))
    def survives(view: Any) -> None:
        sent = encode(view)
        assert decode(sent, kind) == view
        assert decode(bytes(PAIRS[kind]().parse(sent)), kind) == view

    survives()


@pytest.mark.parametrize("gift", [None, views.Gift()], ids=["not offered", "offered with nothing"])
def test_a_gift_of_nothing_is_not_no_gift(gift: views.Gift | None) -> None:
    assert decode(encode(views.Explanation("k", "b", "u", gift=gift)), views.Explanation).gift == gift


def test_what_a_newer_daemon_adds_is_left_out() -> None:
    class Newer(msgspec.Struct):
        ids: tuple[str, ...] = ("a",)
        ended: tuple[str, ...] = ()
        words: str = "new"
        number: float = 1.5

    assert decode(encode(Newer()), views.Undrained) == views.Undrained(("a",), ())


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
@given(data=st.binary(max_size=40))
def test_garbage_is_a_message_or_malformed(kind: Any, data: bytes) -> None:
    with suppress(MalformedError):
        decode(data, kind)


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
def test_a_view_and_its_message_have_the_same_fields(kind: Any) -> None:
    assert kind.__struct_fields__ == tuple(PAIRS[kind].__dataclass_fields__)
