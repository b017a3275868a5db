from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.devices.health import HealthBook
from agent.devices.model import HEALTHY, Health, State
from backends.base import Clears, Signal, Verdict

NOW, DELAYED, DEGRADED, INFO, FINE = Verdict.NOW, Verdict.DELAYED, Verdict.DEGRADED, Verdict.INFO, Verdict.FINE


def signal(
    verdict: Verdict = NOW,
    reason: str = "sick",
    hardware: str = "h",
    *,
    after: float = 0.0,
    recover_after: float = 0.0,
    clears_on: Iterable[Clears] = (),
) -> Signal:
    return Signal(hardware, reason, verdict, f"It is {reason}.", after, recover_after, frozenset(clears_on))


def probe(book: HealthBook, now: float, *signals: Signal, unit: str = "u") -> dict[str, Health]:
    return book.probed("fake", {unit: signals}, now)


def states(changes: dict[str, Health]) -> dict[str, str]:
    return {hardware: health.reason or health.state.value for hardware, health in changes.items()}


# --- probes ---


def test_a_complaint_says_which_since_when_and_its_end_makes_healthy() -> None:
    book = HealthBook()
    assert probe(book, 1.0, signal()) == {"h": Health(State.UNHEALTHY, "sick", "It is sick.", 1.0)}
    assert probe(book, 2.0, signal()) == {}
    assert probe(book, 3.0) == {"h": HEALTHY}
    assert book.of("h") is HEALTHY


def test_the_worst_of_several_counts_and_of_equals_the_first() -> None:
    book = HealthBook()
    assert states(probe(book, 1.0, signal(DEGRADED, "weak"), signal(INFO, "odd"), signal(FINE, "well"))) == {
        "h": "weak"
    }
    assert states(probe(book, 2.0, signal(DEGRADED, "weak"), signal(NOW, "zz"))) == {"h": "zz"}
    assert states(probe(book, 3.0, signal(NOW, "zz"), signal(NOW, "aa"))) == {}


def test_of_two_verdicts_with_one_reason_the_worse_counts_in_whatever_order() -> None:
    for signals in ([signal(NOW), signal(DEGRADED)], [signal(DEGRADED), signal(NOW)]):
        book = HealthBook()
        assert probe(book, 1.0, *signals)["h"].state is State.UNHEALTHY


def test_it_is_unhealthy_since_it_became_so_whatever_the_reason_turns_into() -> None:
    book = HealthBook()
    probe(book, 1.0, signal(NOW, "one"))
    assert probe(book, 2.0, signal(NOW, "two")) == {"h": Health(State.UNHEALTHY, "two", "It is two.", 1.0)}


def test_two_units_that_share_hardware_do_not_take_back_what_the_other_says() -> None:
    book = HealthBook()
    probe(book, 1.0, signal(), unit="one")
    assert probe(book, 2.0, unit="two") == {}
    assert states(probe(book, 3.0, unit="one")) == {"h": "Healthy"}


def test_what_a_probe_said_of_hardware_that_its_device_only_depends_on_ends_with_the_next_probe() -> None:
    book = HealthBook()
    assert states(probe(book, 1.0, signal(hardware="parent"))) == {"parent": "sick"}
    assert states(probe(book, 2.0)) == {"parent": "Healthy"}


# --- time ---


def test_a_delayed_signal_counts_once_it_has_lasted_and_starts_anew_after_a_gap() -> None:
    book = HealthBook()
    down = signal(DELAYED, "down", after=5.0)
    assert probe(book, 0.0, down) == {}
    assert book.next_deadline(0.0) == 5.0
    assert book.ripen(4.9) == {}
    assert probe(book, 4.9) == {}
    assert probe(book, 5.0, down) == {}
    assert book.next_deadline(5.0) == 10.0
    assert states(book.ripen(10.0)) == {"h": "down"}
    assert book.next_deadline(10.0) is None


def test_a_device_that_was_gone_does_not_come_back_with_a_delay_that_has_run_out() -> None:
    book = HealthBook()
    down = signal(DELAYED, "down", after=5.0)
    probe(book, 0.0, down)
    book.probed("fake", {"u": ()}, 1.0)  # as discovery says of a unit that is gone
    assert probe(book, 100.0, down) == {}


def test_recovery_takes_its_time_and_a_relapse_starts_it_anew() -> None:
    book = HealthBook()
    flapping = signal(NOW, "down", recover_after=10.0)
    probe(book, 0.0, flapping)
    assert probe(book, 1.0) == {}
    assert book.next_deadline(1.0) == 11.0
    assert probe(book, 5.0) == {}
    assert book.next_deadline(5.0) == 11.0
    assert probe(book, 9.0, flapping) == {}
    assert book.next_deadline(9.0) is None
    assert probe(book, 10.0) == {}
    assert book.ripen(19.9) == {}
    assert book.ripen(20.0) == {"h": HEALTHY}
    assert book.next_deadline(20.0) is None


def test_a_delayed_signal_that_counts_recovers_with_hysteresis_and_relapses_at_once() -> None:
    book = HealthBook()
    down = signal(DELAYED, "down", after=5.0, recover_after=10.0)
    probe(book, 0.0, down)
    assert states(book.ripen(5.0)) == {"h": "down"}
    assert probe(book, 6.0) == {}
    assert probe(book, 7.0, down) == {}
    assert book.of("h").reason == "down"
    probe(book, 8.0)
    assert states(book.ripen(18.0)) == {"h": "Healthy"}


def test_a_relapse_after_recovery_is_a_new_one_although_nobody_let_time_pass_in_between() -> None:
    book = HealthBook()
    down = signal(DELAYED, "down", after=5.0, recover_after=10.0)
    probe(book, 0.0, down)
    probe(book, 5.0, down)
    probe(book, 6.0)
    assert states(probe(book, 16.0, down)) == {"h": "Healthy"}
    assert book.next_deadline(16.0) == 21.0


@given(st.floats(0, 1e6), st.floats(0.001, 1e3), st.sampled_from(["delayed", "record", "recovering"]))
def test_time_that_runs_to_the_deadline_is_always_enough(began: float, delay: float, what: str) -> None:
    book = HealthBook()
    if what == "delayed":
        probe(book, began, signal(DELAYED, after=delay))
    elif what == "record":
        book.recorded([signal(DELAYED, after=delay)], began)
    else:
        probe(book, began, signal(recover_after=delay))
        probe(book, began)
    deadline = book.next_deadline(began)
    if deadline is not None:  # None: the delay is lost in rounding
        assert book.ripen(deadline).keys() == {"h"}
        assert book.next_deadline(deadline) is None


# --- records ---


def test_what_a_record_says_latches_until_something_it_waits_for_happens() -> None:
    book = HealthBook()
    assert states(book.recorded([signal(clears_on=[Clears.REBIND, Clears.BOOT])], 1.0)) == {"h": "sick"}
    assert probe(book, 2.0) == {}
    assert book.ripen(1e9) == {}
    assert book.cleared(Clears.OPERATOR, ["h", "other"], 3.0) == {}
    assert book.cleared(Clears.REBIND, ["other"], 3.0) == {}
    assert states(book.cleared(Clears.REBIND, ["h"], 4.0)) == {"h": "Healthy"}


def test_a_worse_record_with_the_same_reason_is_not_swallowed_and_neither_softens_the_other() -> None:
    book = HealthBook()
    book.recorded([signal(DEGRADED, "xid", clears_on=[Clears.REBIND])], 1.0)
    assert book.recorded([signal(NOW, "xid", clears_on=[Clears.BOOT])], 2.0)["h"].state is State.UNHEALTHY
    assert book.recorded([signal(DEGRADED, "xid", clears_on=[Clears.REBIND])], 3.0) == {}
    assert book.cleared(Clears.REBIND, ["h"], 4.0) == {}
    assert states(book.cleared(Clears.BOOT, ["h"], 5.0)) == {"h": "Healthy"}


def test_a_delayed_record_counts_once_it_has_lasted() -> None:
    book = HealthBook()
    assert book.recorded([signal(DELAYED, "port-error", after=5.0, clears_on=[Clears.RECOVERED])], 1.0) == {}
    assert book.next_deadline(1.0) == 6.0
    assert states(book.ripen(6.0)) == {"h": "port-error"}


def test_records_and_probes_about_one_thing_do_not_clear_each_other() -> None:
    book = HealthBook()
    book.recorded([signal(DEGRADED, "worn", clears_on=[Clears.BOOT])], 1.0)
    assert states(probe(book, 2.0, signal())) == {"h": "sick"}
    assert states(probe(book, 3.0)) == {"h": "worn"}
    assert book.cleared(Clears.BOOT, ["h"], 4.0) == {"h": HEALTHY}


# --- whatever is probed ---

immediate = st.builds(
    signal, st.sampled_from([NOW, DEGRADED, INFO, FINE]), st.sampled_from(["r", "s"]), st.sampled_from(["h", "g"])
)
probes = st.lists(st.dictionaries(st.sampled_from(["u", "v"]), st.lists(immediate, max_size=3)), max_size=8)


@given(probes)
def test_probes_are_the_whole_truth(rounds: list[dict[str, list[Signal]]]) -> None:
    book, said = HealthBook(), dict[str, list[Signal]]()
    health: dict[str, Health] = {}
    for now, units in enumerate(rounds):
        said |= units
        health |= book.probed("fake", units, float(now))
        for hardware in ("h", "g"):
            verdicts = {s.verdict for signals in said.values() for s in signals if s.hardware == hardware}
            worst = State.UNHEALTHY if NOW in verdicts else State.DEGRADED if DEGRADED in verdicts else State.HEALTHY
            assert book.of(hardware).state is worst
            assert book.of(hardware) == health.get(hardware, HEALTHY)  # every change was told
    for unit in said:
        book.probed("fake", {unit: ()}, 99.0)
    assert not book._active
    assert not book._spoken


def test_ten_thousand_units_without_complaint_cost_next_to_nothing() -> None:
    book = HealthBook()
    assert book.probed("fake", {f"u{n}": () for n in range(10_000)}, 0.0) == {}


@pytest.mark.parametrize("verdict", [INFO, FINE])
def test_what_is_only_said_changes_no_health(verdict: Verdict) -> None:
    book = HealthBook()
    assert probe(book, 0.0, signal(verdict)) == {}
    assert book.recorded([signal(verdict)], 0.0) == {}
