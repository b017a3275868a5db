"""Figures: the percentiles, the verdicts, the table and the JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.figures import Figure, _is_met, document, figure, growth, percentile, slope, table
from bench.limits import LIMITS, Limit

HOW = "in a test"


def met(name: str, size: str, agent: float, baseline: float) -> bool | None:
    return figure(name, size, "ms", [agent], [baseline], HOW).met


@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [([7.0], 0.5, 7.0), ([3.0, 1.0, 2.0], 0.5, 2.0), (range(1, 101), 0.99, 99), (range(1, 101), 0.5, 50)],
)
def test_a_percentile_is_the_sample_of_that_rank(samples: list[float], share: float, expected: float) -> None:
    assert percentile(samples, share) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_percentile_is_reached_by_its_share_of_the_samples(samples: list[float], share: float) -> None:
    found = percentile(samples, share)
    assert found in samples
    assert sum(sample <= found for sample in samples) >= share * len(samples)
    assert sum(sample < found for sample in samples) < share * len(samples)


def test_the_slope_is_what_each_size_more_costs() -> None:
    assert slope([1, 2, 5], [3.0, 5.0, 11.0]) == 2.0
    assert slope([1, 2, 5], [3.0, 3.0, 3.0]) == 0.0


def test_an_allocate_that_takes_longer_the_more_is_held_is_missed() -> None:
    grown = figure("allocate_growth", "1,000 held more", "ms", [0.7], [0.0], HOW)
    assert (grown.met, figure("allocate_growth", "1,000 held more", "ms", [-0.01], [0.0], HOW).met) == (False, True)


def test_what_each_size_more_costs_is_told_of_both_sides() -> None:
    found = {
        n: figure("event_to_list", f"{n}", "ms", [1 + 0.2 * n], [2.0], HOW, [1 + 0.1 * n]) for n in (0.0, 1.0, 5.0)
    }
    grown = growth("event_to_list", "1,000 devices more", "ms", found)
    assert (grown.p50, grown.baseline_p50, grown.bare_p50) == pytest.approx((0.2, 0.0, 0.1))
    assert (grown.met, grown.name) == (False, "event_to_list_growth")


def test_a_limit_in_milliseconds_is_compared_with_the_p50() -> None:
    assert met("event_to_list", "10,000", 6.0, 0.1) is True
    assert met("event_to_list", "10,000", 6.1, 50.0) is False


def test_a_limit_that_is_a_ratio_is_compared_with_the_baseline() -> None:
    limited = Limit("ms", ratio=1.5)
    assert _is_met(limited, 9.9, 1.5, None) is True
    assert _is_met(limited, 0.1, 1.6, 0.1) is False


def test_a_limit_beside_a_plugin_that_took_no_part_is_neither_met_nor_missed() -> None:
    assert met("allocate", "1", 1.0, 1.0) is None


def test_a_figure_without_a_limit_is_neither_met_nor_missed() -> None:
    assert met("exec_to_registered", "100", 1e6, 1.0) is None


def test_a_limit_beside_the_bare_plugin_is_compared_with_that() -> None:
    def beside(bare: float) -> bool | None:
        return figure("event_to_list", "8", "ms", [1.35], [0.1], HOW, [bare]).met

    assert (beside(1.0), beside(0.9)) == (True, False)


def test_a_p99_is_told_only_where_there_are_a_hundred_samples() -> None:
    assert figure("flip", "x", "ms", [1.0] * 99, [1.0], HOW).p99 is None
    assert figure("flip", "x", "ms", [1.0] * 100, [1.0], HOW).p99 == 1.0


def test_there_is_no_ratio_to_nothing() -> None:
    it = figure("idle_cpu", "100", "%", [0.1], [0.0], HOW)
    assert it.ratio is None
    assert it.met is True
    assert " -  " in table([it])


def test_a_missed_limit_comes_with_its_reason_and_a_met_one_without() -> None:
    missed = figure("rss", "100", "MB", [40.0], [30.0], HOW)
    kept = figure("rss", "100", "MB", [30.0], [30.0], HOW)
    assert missed.reason
    assert kept.reason is None
    assert missed.reason in table([missed])
    assert "MISSED" not in table([kept])


def test_the_table_has_a_line_for_each_figure_and_the_numbers_asked_for() -> None:
    text = table([figure("flip", "1 of 10,000", "ms", [0.5, 0.25], [2.0], HOW)])
    header, line = text.splitlines()
    assert header.split()[:3] == ["figure", "size", "unit"]
    assert line.split() == [
        "flip",
        "1",
        "of",
        "10,000",
        "ms",
        "0.25",
        "0.25",
        "-",
        "2",
        "-",
        "0.125",
        "-",
        "-",
        "-",
        "<=",
        "1",
        "ms",
        "met",
        "2",
    ]


def test_the_json_has_the_keys_that_tools_read() -> None:
    read = json.loads(document([figure("flip", "1 of 10,000", "ms", [1.0], [2.0], HOW)], {"cpus": 2}))
    (only,) = read["figures"]
    assert {"name", "size", "unit", "p50", "p99", "baseline_p50", "baseline_p99", "ratio"} <= only.keys()
    assert (only["p50"], only["ratio"]) == (1.0, 0.5)
    assert read["machine"] == {"cpus": 2}


def test_every_limit_has_exactly_one_bound() -> None:
    assert all([limit.p50, limit.ratio, limit.bare].count(None) == 2 for limit in LIMITS.values())


def test_figures_are_values() -> None:
    one: Figure = figure("flip", "x", "ms", [1.0], [2.0], HOW)
    assert one == figure("flip", "x", "ms", [1.0], [2.0], HOW)
