"""What a scan changed, and that it is published in parts where it is much."""

from __future__ import annotations

import pytest

from agent.discovery.reading import Changes, UnitState, changes_of
from backends.base import Link, Signal, Verdict
from tests.fakes import KIND, device


@pytest.mark.parametrize(
    ("devices", "gone", "parts"),
    [
        ([], 0, [(0, 0)]),
        ([1, 1], 1, [(2, 1)]),
        ([1, 1, 1, 1, 1], 0, [(4, 0), (1, 0)]),
        ([None, None, None, None, None], 2, [(4, 0), (1, 2)]),
        ([9, 1], 4, [(1, 0), (1, 3), (0, 1)]),
        ([4], 1, [(1, 0), (0, 1)]),
        ([], 9, [(0, 4), (0, 4), (0, 1)]),
    ],
)
def test_parts_have_about_so_many_devices_and_what_is_gone_comes_last(
    devices: list[int | None], gone: int, parts: list[tuple[int, int]]
) -> None:
    """None: a unit that was read and does not differ."""
    lost = {f"g{n}": () for n in range(gone)}
    found = {f"u{n}": tuple(device(f"u{n}-{k}") for k in range(it)) for n, it in enumerate(devices) if it is not None}
    signals = {**lost, **{f"u{n}": () for n in range(len(devices))}}
    links = {unit: (Link("a", "b", 1),) for unit in found}
    whole = Changes(KIND, lost | found, signals, links, since=1.0, by_reload=True, beside=dict(found))
    told = list(whole.in_parts(4))
    assert [(len(it.signals.keys() - lost.keys()), len(it.signals.keys() & lost.keys())) for it in told] == parts
    for name in ("units", "signals", "links", "beside"):
        joined = {unit: value for it in told for unit, value in getattr(it, name).items()}
        assert joined == getattr(whole, name)
    assert [it.more for it in told] == [True] * (len(parts) - 1) + [False]
    assert [it.by_reload for it in told] == [True] + [False] * (len(parts) - 1)
    assert {it.since for it in told} == {1.0}


def test_signals_count_as_devices_do() -> None:
    signals = {unit: tuple(Signal(f"{unit}{n}", "sick", Verdict.NOW, "") for n in range(3)) for unit in "abc"}
    assert [set(it.signals) for it in Changes(KIND, {}, signals).in_parts(4)] == [{"a", "b"}, {"c"}]


def test_a_unit_differs_where_only_what_cannot_be_had_went_or_came() -> None:
    """A card that vfio does not offer and that is pulled out has gone, too: whoever counts how often must hear of it."""
    card = (device("gpu"),)
    shown, empty = UnitState(beside=card), UnitState()
    assert changes_of(KIND, {"12": shown}, {"12": empty}).units == {"12": ()}
    came = changes_of(KIND, {"12": empty}, {"12": shown})
    assert (came.units, came.beside) == ({"12": ()}, {"12": card})
    assert changes_of(KIND, {"12": shown}, {"12": UnitState(beside=card)}).units == {}
