"""Numbers that health compares with what they were."""

from __future__ import annotations

import pytest

from agent.health import HealthBook
from tests.fakes import device
from tests.health.said import BELOW_BEST, DELAYED, NOW, RISES, bound, number, probe, states


def test_a_counter_counts_only_while_it_rises(book: HealthBook) -> None:
    assert probe(book, 0.0, number(7)) == {}
    assert probe(book, 1.0, number(7)) == {}
    assert states(probe(book, 2.0, number(8))) == {"h": "errors-rises"}
    assert probe(book, 3.0, number(9)) == {}
    assert states(probe(book, 4.0, number(9))) == {"h": "Healthy"}


def test_it_counts_a_while_longer_after_it_rose_last(book: HealthBook) -> None:
    for now, value in ((0.0, 1), (1.0, 2), (5.0, 3), (6.0, 3)):
        probe(book, now, number(value, recover_after=10.0))
    assert book.next_deadline() == 16.0
    assert book.ripen(15.9, 15.9) == {}
    assert states(book.ripen(16.0, 16.0)) == {"h": "Healthy"}


@pytest.mark.parametrize("verdict", [NOW, DELAYED])
def test_a_rise_that_has_ended_recovers_whatever_its_verdict(book: HealthBook, verdict: object) -> None:
    for now, value in ((0.0, 1), (1.0, 2), (2.0, 2)):
        probe(book, now, number(value, verdict=verdict, recover_after=3.0))  # type: ignore[arg-type]
    assert book.of("h").reason == "errors-rises"
    assert states(book.ripen(5.0, 5.0)) == {"h": "Healthy"}


def test_a_counter_that_falls_was_reset_and_is_a_new_baseline(book: HealthBook) -> None:
    probe(book, 0.0, number(250))
    assert probe(book, 1.0, number(3)) == {}
    assert states(probe(book, 2.0, number(4))) == {"h": "errors-rises"}


def test_a_number_that_could_not_be_read_for_once_is_compared_with_what_it_was_before(book: HealthBook) -> None:
    probe(book, 0.0, number(100, BELOW_BEST))
    probe(book, 1.0)
    assert states(probe(book, 2.0, number(50, BELOW_BEST))) == {"h": "errors-below-best"}


def test_a_rate_counts_as_long_as_it_is_below_the_best_seen(book: HealthBook) -> None:
    assert probe(book, 0.0, number(50, BELOW_BEST)) == {}
    assert probe(book, 1.0, number(100, BELOW_BEST)) == {}
    assert states(probe(book, 2.0, number(50, BELOW_BEST))) == {"h": "errors-below-best"}
    assert probe(book, 3.0, number(50, BELOW_BEST)) == {}
    assert states(probe(book, 4.0, number(100, BELOW_BEST))) == {"h": "Healthy"}


def test_the_numbers_of_one_piece_of_hardware_are_told_apart_by_name_and_so_are_their_signals(book: HealthBook) -> None:
    probe(book, 0.0, number(1, name="port 1"), number(9, name="port 2"))
    probe(book, 1.0, number(2, name="port 1"), number(9, name="port 2"))
    probe(book, 2.0, number(3, name="port 1"), number(10, name="port 2"))
    assert [it.reason for it in book.signals_of("h", 2.0)] == ["port 1-rises", "port 2-rises"]


def test_what_has_gone_begins_anew_when_it_is_back(book: HealthBook) -> None:
    probe(book, 0.0, number(1), number(100, BELOW_BEST, name="rate"))
    book.found("fake", {"u": []}, 1.0)
    assert probe(book, 2.0, number(2), number(50, BELOW_BEST, name="rate")) == {}


def test_in_a_unit_that_is_there_only_the_hardware_that_has_gone_begins_anew(book: HealthBook) -> None:
    numbers = [number(1, hardware="h"), number(1, hardware="g"), number(1, hardware="parent")]
    probe(book, 0.0, *numbers)
    book.found("fake", {"u": [device("h", depends=["parent"])]}, 1.0)
    again = [number(2, hardware="h"), number(2, hardware="g"), number(2, hardware="parent")]
    assert states(probe(book, 2.0, *again)) == {"h": "errors-rises", "parent": "errors-rises"}


def test_another_driver_counts_from_its_own_beginning(book: HealthBook) -> None:
    book.found("fake", {"u": [bound("old")]}, 0.0)
    probe(book, 0.0, number(1), number(100, BELOW_BEST, name="rate"))
    book.found("fake", {"u": [bound("new")]}, 1.0)
    assert probe(book, 1.0, number(5), number(50, BELOW_BEST, name="rate")) == {}


def test_a_slower_cable_that_an_operator_declares_well_is_the_best_from_then_on(book: HealthBook) -> None:
    probe(book, 0.0, number(100, BELOW_BEST))
    probe(book, 1.0, number(50, BELOW_BEST))
    book.undrain(["h"], 2.0)
    assert states(probe(book, 3.0, number(50, BELOW_BEST))) == {"h": "Healthy"}
    assert states(probe(book, 4.0, number(40, BELOW_BEST))) == {"h": "errors-below-best"}


def test_two_units_that_read_the_same_number_do_not_make_it_rise(book: HealthBook) -> None:
    for now in range(3):
        for unit, value in (("u", 5), ("v", 9)):
            assert probe(book, float(now), number(value, RISES), unit=unit) == {}
