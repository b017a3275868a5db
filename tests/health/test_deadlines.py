"""When time alone changes something; the next of all deadlines is found in no time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health import HealthBook
from agent.health.book import Deadlines
from tests.health.said import DELAYED, INFO, probe, signal

names = st.sampled_from("abc")
moments = st.one_of(st.none(), st.floats(0, 9))


@given(st.lists(st.one_of(st.tuples(names, moments), st.floats(0, 9)), max_size=300))
def test_it_knows_of_each_name_the_last_deadline_that_was_set(steps: list[tuple[str, float | None] | float]) -> None:
    deadlines, due = Deadlines(), dict[str, float]()
    for step in steps:
        if isinstance(step, tuple):
            deadlines.set(*step)
            due = {name: at for name, at in {**due, step[0]: step[1]}.items() if at is not None}
        else:
            over = {name for name, at in due.items() if at <= step}
            popped = deadlines.pop(step)
            assert (sorted(popped), [due[name] for name in popped]) == (
                sorted(over),
                sorted(due[name] for name in over),
            )
            due = {name: at for name, at in due.items() if name not in over}
        assert deadlines.next() == min(due.values(), default=None)


def test_outdated_entries_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.set("h", 1e9 + number % 2)
    assert len(deadlines._heap) < 200


class Asked(dict[str, float]):
    """Counts how often it is asked for one entry, and refuses to show all."""

    count = 0

    def get(self, *of: Any) -> Any:
        self.count += 1
        return super().get(*of)

    def _all(self, *_: object) -> Any:
        raise AssertionError("the next deadline is found without a look at all")

    __iter__ = items = keys = values = _all


def test_however_many_signals_are_shown_and_wait_the_next_deadline_is_found_with_one_look(
    book: HealthBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(1000):
        waits = signal(DELAYED, hardware=f"h{n}", after=5.0 + n)
        probe(book, 0.0, waits, signal(INFO, hardware=f"h{n}"), unit=f"u{n}")
    judged: list[str] = []
    asked = book._deadlines._due = Asked(book._deadlines._due)
    with monkeypatch.context() as noted:
        noted.setattr(book, "_judge_one", lambda hardware, *_, **__: judged.append(hardware))
        for now in range(4):
            assert book.next_deadline() == 5.0
            assert book.ripen(now, now) == {}
    assert judged == []
    assert asked.count <= 2 * 4
    assert book.ripen(6.0, 6.0).keys() == {"h0", "h1"}
