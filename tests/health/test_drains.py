"""Hardware that an operator takes out of service."""

from __future__ import annotations

import pytest

from agent.health import Drain, HealthBook
from agent.health.drains import span
from agent.model import HEALTHY, State
from backends.base import Clears
from tests.health.said import BOOT, DEGRADED, NOW, flap, latch, probe, signal, states

WALL = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC


def drained(reason: str = "replacing the fan", until: float | None = None) -> HealthBook:
    book = HealthBook(BOOT)
    book.drain(["h"], reason, until, 0.0, WALL)
    return book


@pytest.mark.parametrize(
    ("reason", "until", "sentence"),
    [
        ("", None, "an operator drained it"),
        ("the fan.", None, "an operator drained it: the fan"),
        ("the fan", WALL + 90.9, "an operator drained it: the fan, until 2027-01-15 08:01:30 UTC"),
    ],
)
def test_it_is_unhealthy_with_the_operators_words(reason: str, until: float | None, sentence: str) -> None:
    health = drained(reason, until).of("h")
    assert (health.state, health.reason, health.message, health.since) == (State.UNHEALTHY, "drained", sentence, 0.0)


def test_until_it_is_undrained() -> None:
    book = drained()
    assert book.next_deadline() is None
    assert book.ripen(1e6, WALL + 1e6) == {}
    assert states(book.undrain(["h", "never drained"], 1e6)) == {"h": "Healthy"}


def test_until_its_time_has_come_by_the_wall_clock() -> None:
    book = drained(until=WALL + 90.0)
    assert book.next_deadline() == 60.0  # the clock may be set meanwhile
    assert book.ripen(60.0, WALL + 60.0) == {}
    assert book.next_deadline() == 90.0
    assert states(book.ripen(90.0, WALL + 90.0)) == {"h": "Healthy"}
    assert book.next_deadline() is None


def test_a_clock_that_is_set_ends_it_sooner_or_later() -> None:
    sooner, later = drained(until=WALL + 3600.0), drained(until=WALL + 90.0)
    assert states(sooner.ripen(60.0, WALL + 3700.0)) == {"h": "Healthy"}
    assert later.ripen(60.0, WALL - 3600.0) == {}
    assert later.ripen(120.0, WALL - 3540.0) == {}


def test_an_end_that_is_lost_in_rounding_is_not_missed() -> None:
    book, now, wall = HealthBook(BOOT), 1e11 / 3, 1e10 / 3
    book.drain(["h"], "", wall + 2e-6, now, wall)
    for _ in range(1000):
        due = book.next_deadline()
        if due is None:
            break
        assert due > now
        wall, now = wall + (due - now), due
        book.ripen(now, wall)
    assert book.of("h") is HEALTHY
    assert Drain("h", "", 0.0, 1.0).deadline(1e15, 0.99) > 1e15  # type: ignore[operator]


def test_drained_again_the_later_words_count() -> None:
    book = drained("first", WALL + 10.0)
    assert book.drain(["h"], "second", None, 1.0, WALL + 1.0)["h"].message == "an operator drained it: second"
    assert book.ripen(60.0, WALL + 60.0) == {}


def test_an_operator_sees_both_the_drain_and_what_is_the_matter_besides() -> None:
    book = drained()
    assert probe(book, 1.0, signal(NOW, "port-down", message="Port 1 is down."))["h"].message == (
        "an operator drained it: replacing the fan; besides, it is Unhealthy with port-down (Port 1 is down)"
    )
    assert probe(book, 2.0, signal(DEGRADED, "slow", message="It is slow."))["h"].message == (
        "an operator drained it: replacing the fan; besides, it is Degraded with slow (It is slow)"
    )
    assert book.of("h").since == 0.0
    assert probe(book, 3.0)["h"].message == "an operator drained it: replacing the fan"


def test_a_drain_comes_before_quarantine_and_its_sentence_tells_of_both(book: HealthBook) -> None:
    flap(book, 5)
    health = book.drain(["h"], "the fan", None, 9.0, WALL)["h"]
    assert health.reason == "drained"
    assert "besides, it is Unhealthy with flapping (it became Unhealthy 5 times" in health.message


def test_undrain_is_back_into_service_latches_that_wait_for_an_operator_and_quarantine_end_with_it(
    book: HealthBook,
) -> None:
    flap(book, 5)
    latch(book, 10.0, signal(NOW, "xid-63", clears_on=[Clears.OPERATOR]))
    book.drain(["h"], "", None, 11.0, WALL)
    assert book.undrain(["h"], 12.0) == {"h": HEALTHY}


def test_drains_outlive_restarts_and_boots() -> None:
    book = drained(until=WALL + 90.0)
    for boot, now in ((BOOT, 10.0), ("boot 2", 3.0)):
        after = HealthBook(boot)
        assert after.restore(book.kept(), now, WALL + 10.0)["h"].message == book.of("h").message
        assert after.of("h").since == now - 10.0
        assert states(after.ripen(now + 80.0, WALL + 90.0)) == {"h": "Healthy"}


def test_a_drain_whose_time_came_while_we_were_down_is_over() -> None:
    after = HealthBook(BOOT)
    assert after.restore(drained(until=WALL + 90.0).kept(), 100.0, WALL + 100.0) == {}
    assert after.kept().drains == ()


def test_what_another_agent_undrained_while_we_waited_is_undrained() -> None:
    book = drained()
    assert states(book.restore(HealthBook(BOOT).kept(), 1.0, WALL)) == {"h": "Healthy"}


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "1 s"), (59.2, "60 s"), (119.0, "119 s"), (120.0, "2 min"), (540.1, "10 min"), (7200.0, "2 h")],
)
def test_durations_are_said_as_a_person_says_them(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_a_drain_is_dated_from_itself_and_what_it_covered_from_its_own_beginning_also_over_a_restart() -> None:
    book = HealthBook(BOOT)
    probe(book, 5.0, signal(NOW, "port-down"))
    book.drain(["h"], "", None, 100.0, WALL + 100.0)
    assert book.of("h").since == 100.0
    book.drain(["h"], "another reason", None, 150.0, WALL + 150.0)
    assert book.of("h").since == 100.0  # drained all the time
    after = HealthBook(BOOT)
    after.restore(book.kept(), 200.0, WALL + 200.0)
    assert after.of("h").since == 100.0
    assert book.undrain(["h"], 300.0)["h"].since == 5.0
