"""A device's changes, folded into the periods of its last 24 hours."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.history import timeline
from agent.history.timeline import GONE, SPAN, UNKNOWN, WELL, Book, Change, Condition, Period, Run, kept, periods

NOW = 1_800_000_000.0
KEY = ("a.example/one", "card")
STATES = st.sampled_from(["Healthy", "Degraded", "Unhealthy", "Drained", "Gone"])
CONDITIONS = st.builds(Condition, STATES, holders=st.sampled_from([(), ("default/train",)]))
TIMES = st.integers(-2 * int(SPAN), int(SPAN) // 2).map(lambda it: NOW + it)  # half a day in the future, too
ALWAYS = [Run(NOW - 9 * SPAN, NOW + 9 * SPAN)]


@st.composite
def changes(draw: st.DrawFn, *, in_order: bool = False) -> list[Change]:
    times = draw(st.lists(TIMES, max_size=8))
    conditions = [draw(CONDITIONS) for _ in times]
    said = zip(sorted(times) if in_order else times, conditions, strict=True)
    return [Change(*KEY, time, it, "" if n else "Healthy") for n, (time, it) in enumerate(said)]


def at(shown: Sequence[Period], time: float) -> Condition:
    return next(it.condition for it in shown if it.begins <= time < it.ends)


@given(changes(), st.lists(st.builds(Run, TIMES, TIMES), max_size=4))
def test_the_periods_cover_the_last_24_hours_once_whatever_the_clock_did(noted: list[Change], runs: list[Run]) -> None:
    shown = periods(noted, runs, NOW)
    assert (shown[0].begins, shown[-1].ends) == (NOW - SPAN, NOW)
    assert all(it.begins < it.ends for it in shown)
    assert all(one.ends == following.begins for one, following in pairwise(shown))


@given(changes(in_order=True), st.integers(1, int(SPAN)))
def test_at_any_moment_it_is_as_the_last_change_before_said(noted: list[Change], ago: int) -> None:
    moment = NOW - ago
    said = [it.condition for it in noted if it.time <= moment]
    assert at(periods(noted, ALWAYS, NOW), moment) == (said[-1] if said else WELL)


@given(changes(in_order=True), st.lists(TIMES, min_size=4, max_size=4, unique=True), st.integers(1, int(SPAN)))
def test_what_nobody_watched_is_unknown(noted: list[Change], times: list[float], ago: int) -> None:
    a, b, c, d = sorted(times)
    moment = NOW - ago
    is_watched = a <= moment < b or c <= moment < d
    assert (at(periods(noted, [Run(a, b), Run(c, d)], NOW), moment).state != UNKNOWN) == is_watched


def test_what_a_daemon_finds_at_its_start_is_so_from_its_start_on() -> None:
    gone, runs = Condition(GONE), [Run(NOW - 900, NOW - 600), Run(NOW - 300, NOW)]
    assert [(it.begins, it.condition.state) for it in periods([Change(*KEY, NOW - 300.1, gone, "Healthy")], runs, NOW)] == [
        (NOW - SPAN, UNKNOWN), (NOW - 900, "Healthy"), (NOW - 600, UNKNOWN), (NOW - 300, GONE),
    ]  # fmt: skip


def test_after_the_clock_was_set_back_the_newest_state_is_the_one_of_now() -> None:
    ill, well = Condition("Unhealthy", "xid-79"), Condition()
    noted = [Change(*KEY, NOW + 7200, ill, "Healthy"), Change(*KEY, NOW - 60, well)]
    assert periods(noted, ALWAYS, NOW)[-1] == Period(NOW - 60, NOW, well)
    came = [Change(*KEY, NOW + 3600, well, GONE)]
    for runs in (ALWAYS, [Run(NOW - 60, NOW)], [Run(NOW + 3500, NOW + 3700), Run(NOW - 1, NOW)]):
        assert periods(came, runs, NOW)[-1].condition == well


@given(changes(), st.integers(0, 2 * int(SPAN)))
def test_what_is_dropped_for_its_age_is_seen_by_nobody_now_or_later(noted: list[Change], later: int) -> None:
    left = kept(noted, NOW)
    if not left and noted and noted[-1].condition.state == GONE:
        return  # it is on no list, and not told of any more
    for now in (NOW, NOW + later):
        assert periods(left, ALWAYS, now) == periods(noted, ALWAYS, now)


def test_a_device_that_was_well_all_day_or_gone_takes_no_room() -> None:
    assert not kept(
        [Change(*KEY, NOW - 2 * SPAN, Condition("Degraded"), "Healthy"), Change(*KEY, NOW - SPAN, WELL)], NOW
    )
    assert not kept([Change(*KEY, NOW - SPAN, Condition(GONE), "Healthy")], NOW)
    assert kept([Change(*KEY, NOW - SPAN, Condition("Degraded"), "Healthy")], NOW)


# --- the book of all devices ---

KEYS = st.sampled_from([("a.example/one", name) for name in "xyz"])


@given(st.lists(st.tuples(KEYS, CONDITIONS), max_size=40), st.data())
def test_what_the_bound_forgets_is_unknown_and_never_told_wrong(
    notes: list[tuple[tuple[str, str], Condition]], data: st.DataObject
) -> None:
    whole, small, most = Book(), Book(), (timeline.IN_ALL, timeline.PER_DEVICE)
    try:
        for n, (key, condition) in enumerate(notes):
            appeared = whole.now(key).state == GONE
            timeline.IN_ALL, timeline.PER_DEVICE = most  # type: ignore[misc]
            whole.note(key, condition, NOW - 1000 + n)
            timeline.IN_ALL, timeline.PER_DEVICE = 6, 4  # type: ignore[misc]
            small.note(key, condition, NOW - 1000 + n, appeared=appeared)
            assert len(list(small.all())) <= 6 + 3  # of each of the three, how it is
    finally:
        timeline.IN_ALL, timeline.PER_DEVICE = most  # type: ignore[misc]
    restored = Book()
    restored.restore(small.all())
    for key in small.devices():
        assert restored.of(key) == small.of(key)
        told, truth = periods(small.of(key), ALWAYS, NOW), periods(whole.of(key), ALWAYS, NOW)
        moment = NOW - data.draw(st.integers(955, 1005))
        assert at(told, moment) in (at(truth, moment), Condition(UNKNOWN, message=at(told, moment).message))
        assert told[-1].condition == truth[-1].condition


def test_a_device_that_comes_back_after_its_past_was_forgotten_was_unknown_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeline, "IN_ALL", 6)
    noted, (x, y) = Book(), ((KEY[0], "x"), (KEY[0], "y"))
    noted.note(x, Condition("Degraded"), NOW - 900)
    noted.note(x, Condition(GONE), NOW - 800)
    for n in range(8):
        noted.note(y, Condition("Degraded" if n % 2 else "Unhealthy"), NOW - 700 + n)
    assert x not in noted.devices()
    noted.note(x, WELL, NOW - 100, appeared=True)
    assert [it.condition.state for it in periods(noted.of(x), ALWAYS, NOW)] == [UNKNOWN, "Healthy"]


def test_a_device_that_never_rests_takes_nothing_from_what_is_told_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "PER_DEVICE", 3)
    monkeypatch.setattr(timeline, "IN_ALL", 6)
    noted, (x, y) = Book(), ((KEY[0], "x"), (KEY[0], "y"))
    for n, state in enumerate(("Degraded", "Unhealthy", "Healthy")):
        noted.note(x, Condition(state), NOW - 900 + n)
    for n in range(40):
        noted.note(y, Condition("Degraded" if n % 2 else "Unhealthy"), NOW - 700 + n)
    assert [len(noted.of(it)) for it in (x, y)] == [3, 3]
    later = NOW + SPAN - 890
    noted.forget([x], later)
    assert x not in noted.devices()
    for n in range(40):
        noted.note(x, Condition("Degraded" if n % 2 else GONE), later + n)
    assert [len(noted.of(it)) for it in (x, y)] == [3, 3]


def test_what_a_device_comes_back_to_again_and_again_is_in_memory_once() -> None:
    noted = Book()
    for n in range(40):
        noted.note(
            KEY, Condition("Gone" if n % 2 else "Healthy", message=f"it is {'not' * (n % 2)} there"), NOW - 100 + n
        )
    assert len(set(map(id, (it.condition for it in noted.of(KEY))))) == 2
