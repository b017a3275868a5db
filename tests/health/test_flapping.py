"""Quarantine: when it begins, how long it lasts, what ends it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agent.health import HealthBook
from agent.health.causes import WINDOW
from agent.health.drains import FAILURES, FIRST, FORGOTTEN_AFTER, LONGEST
from agent.model import HEALTHY, Health, State
from backends.base import Clears, Signal
from tests.health.said import BOOT, DEGRADED, NOW, flap, latch, probe, signal, states

WALL = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC


def quarantined(*, at: float = 0.0) -> HealthBook:
    """Healthy hardware whose last failure, at `at` seconds, was one too many."""
    book = HealthBook(BOOT)
    book.ripen(at - 8.0, WALL + at - 8.0)
    flap(book, FAILURES, at - 8.0)
    return book


def test_hardware_that_fails_too_often_stays_unhealthy_with_a_sentence_that_says_why_and_until_when(
    book: HealthBook,
) -> None:
    book.ripen(0.0, WALL)
    assert flap(book, FAILURES - 1) == 7.0
    assert book.of("h") is HEALTHY
    failed = probe(book, 8.0, signal(NOW, "port-down", message="Port 1 is down."))["h"]
    assert (failed.state, failed.reason, failed.since) == (State.UNHEALTHY, "flapping", 8.0)
    assert failed.message == (
        "it became Unhealthy 5 times in 8 s, the last time with port-down (Port 1 is down); "
        "it is left out for 60 s, until 2027-01-15 08:01:08 UTC"
    )
    assert probe(book, 9.0) == {}
    assert book.next_deadline() == 8.0 + FIRST
    assert states(book.ripen(68.0, WALL + 68.0)) == {"h": "Healthy"}


def test_while_it_is_in_quarantine_its_flapping_changes_nothing_that_is_sent_or_logged() -> None:
    book = quarantined()
    for now in range(1, 60):
        assert probe(book, float(now), *([signal()] if now % 2 else [])) == {}


@pytest.mark.parametrize(
    ("cause", "every"),
    [
        pytest.param(signal(), WINDOW / (FAILURES - 1) + 1, id="what fails now and then"),
        pytest.param(signal(DEGRADED), 2.0, id="what is degraded"),
        pytest.param(signal(NOW, "moved", unless_held=True), 2.0, id="what moves into pods and back"),
    ],
)
def test_it_does_not_flap(book: HealthBook, cause: Signal, every: float) -> None:
    flap(book, 50, every=every, cause=cause)
    assert book.of("h") is HEALTHY


def test_failures_of_hours_ago_do_not_count_although_none_was_forgotten_in_between(book: HealthBook) -> None:
    flap(book, FAILURES - 1, every=WINDOW - 1)
    flap(book, 1, began=FAILURES * WINDOW)
    assert book.of("h") is HEALTHY
    flap(book, FAILURES, began=10 * WINDOW)
    assert book.of("h").message.startswith("it became Unhealthy 5 times in 8 s")


def test_what_goes_on_flapping_is_left_out_again_without_a_moment_of_health_and_twice_as_long() -> None:
    book, now = quarantined(), 0.0
    lengths: list[float] = []
    while len(lengths) < 8:
        deadline = book.next_deadline()
        assert deadline is not None
        lengths.append(deadline - now)
        flap(book, FAILURES, deadline - 20.0)
        assert book.of("h").reason == "flapping"
        assert states(book.ripen(deadline, WALL + deadline)) == {"h": "flapping"}
        now = deadline
    assert lengths == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, LONGEST, LONGEST]


def test_a_quarantine_soon_after_the_last_is_twice_as_long_and_one_long_after_is_a_first_one() -> None:
    book = quarantined()
    book.ripen(FIRST, WALL + FIRST)
    flap(book, FAILURES, 1000.0)
    assert book.next_deadline() == 1008.0 + 2 * FIRST
    end = 1008.0 + 2 * FIRST
    assert states(book.ripen(end, WALL + end)) == {"h": "Healthy"}
    later = end + FORGOTTEN_AFTER
    assert book.ripen(later, WALL + later) == {}
    assert book.kept().quarantines == ()
    flap(book, FAILURES, later)
    assert book.next_deadline() == later + 8.0 + FIRST


def test_a_quarantine_of_long_ago_is_forgotten_although_nobody_let_time_pass_in_between() -> None:
    book = quarantined()
    flap(book, FAILURES, began=FIRST + FORGOTTEN_AFTER)
    assert book.next_deadline() == FIRST + FORGOTTEN_AFTER + 8.0 + FIRST


def test_what_is_broken_when_its_quarantine_ends_is_unhealthy_for_that() -> None:
    book = quarantined()
    probe(book, 50.0, signal(NOW, "driver-unbound"))
    assert states(book.ripen(60.0, WALL)) == {"h": "driver-unbound"}
    assert states(probe(book, 61.0)) == {"h": "Healthy"}


def test_what_stays_unhealthy_does_not_flap_whatever_reasons_come_and_go(book: HealthBook) -> None:
    probe(book, 0.0, signal(NOW, "broken"), unit="broken")
    flap(book, 50)
    assert book.of("h").reason == "broken"


def test_hardware_that_is_drained_does_not_flap(book: HealthBook) -> None:
    book.drain(["h"], "", WALL + 200.0, 0.0, WALL)
    flap(book, 50)
    assert states(book.ripen(200.0, WALL + 200.0)) == {"h": "Healthy"}
    flap(book, FAILURES - 1, 200.0)
    assert book.kept().quarantines == ()


def test_what_was_broken_before_its_drain_ended_did_not_fail_then(book: HealthBook) -> None:
    probe(book, 0.0, signal())
    for now in range(1, 50):
        book.drain(["h"], "", None, float(now), WALL)
        book.undrain(["h"], now + 0.5)
    assert book.of("h").reason == "sick"


def test_what_is_latched_and_cleared_over_and_over_flaps(book: HealthBook) -> None:
    for now in range(FAILURES):
        latch(book, float(now), signal(NOW, "xid-48", clears_on=[Clears.OUR_RESET]))
        book.cleared(Clears.OUR_RESET, ["h"], now + 0.5)
    assert book.of("h").reason == "flapping"


def test_recovered_and_failed_at_one_moment_is_not_failed_anew(book: HealthBook) -> None:
    probe(book, 0.0, signal(NOW, "one"), unit="u")
    for now in range(1, 50):
        probe(book, float(now), unit="u" if now % 2 else "v")
        probe(book, float(now), signal(NOW, "other"), unit="v" if now % 2 else "u")
    assert (book.of("h").reason, book.of("h").since) == ("other", 0.0)


@pytest.mark.parametrize(
    "end",
    [lambda book: book.undrain(["h"], 10.0), lambda book: book.cleared(Clears.OPERATOR, ["h"], 10.0)],
    ids=["undrain", "clear"],
)
def test_an_operator_ends_quarantine_and_its_back_off(end: Callable[[HealthBook], dict[str, Health]]) -> None:
    book = quarantined()
    assert states(end(book)) == {"h": "Healthy"}
    assert book.kept().quarantines == ()
    flap(book, FAILURES, 20.0)
    assert book.next_deadline() == 28.0 + FIRST


def test_quarantine_and_its_back_off_outlive_a_restart_and_end_with_a_boot() -> None:
    book = quarantined()
    after = HealthBook(BOOT)
    assert states(after.restore(book.kept(), 30.0, WALL + 30.0)) == {"h": "flapping"}
    assert after.of("h") == book.of("h")
    assert states(after.ripen(60.0, WALL + 60.0)) == {"h": "Healthy"}
    flap(after, FAILURES, 100.0)
    assert after.next_deadline() == 108.0 + 2 * FIRST
    assert HealthBook("boot 2").restore(book.kept(), 5.0, WALL) == {}


def test_a_quarantine_that_another_agent_ended_while_we_waited_is_over() -> None:
    assert states(quarantined().restore(HealthBook(BOOT).kept(), 10.0, WALL)) == {"h": "Healthy"}


def test_a_quarantine_cannot_outlast_the_longest_whatever_the_file_says() -> None:
    book, after = quarantined(at=1e6), HealthBook(BOOT)
    after.restore(book.kept(), 5.0, WALL)
    assert states(after.ripen(5.0 + LONGEST, WALL + LONGEST)) == {"h": "Healthy"}
