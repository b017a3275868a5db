"""When time alone changes something; the next of all deadlines is found in no time."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from agent.devices.health import HealthBook
from agent.devices.health.deadlines import Deadlines
from tests.devices.said import DELAYED, INFO, probe, signal

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


def test_with_ten_thousand_signals_that_are_shown_and_wait_the_next_deadline_costs_next_to_nothing() -> None:
    book = HealthBook()
    for n in range(10_000):
        waits = signal(DELAYED, hardware=f"h{n}", after=5.0 + n)
        probe(book, 0.0, waits, signal(INFO, hardware=f"h{n}"), unit=f"u{n}")
    began = time.process_time()
    for now in range(1000):
        assert book.next_deadline() == 5.0
        book.ripen(now / 1000, now / 1000)
    assert time.process_time() - began < 0.25
    assert book.ripen(6.0, 6.0).keys() == {"h0", "h1"}
