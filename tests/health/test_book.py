from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.health import HealthBook
from agent.model import HEALTHY, Health, State
from backends.base import Clears, Signal
from tests.health.said import DEGRADED, DELAYED, FINE, INFO, NOW, flap, latch, probe, signal, states

# --- probes ---


def test_a_complaint_says_which_since_when_and_its_end_makes_healthy(book: HealthBook) -> None:
    assert probe(book, 1.0, signal()) == {"h": Health(State.UNHEALTHY, "sick", "It is sick.", 1.0)}
    assert probe(book, 2.0, signal()) == {}
    assert probe(book, 3.0) == {"h": HEALTHY}
    assert book.of("h") is HEALTHY


def test_the_worst_of_several_counts_and_of_equals_the_first(book: HealthBook) -> None:
    assert states(probe(book, 1.0, signal(DEGRADED, "weak"), signal(INFO, "odd"), signal(FINE, "well"))) == {
        "h": "weak"
    }
    assert states(probe(book, 2.0, signal(DEGRADED, "weak"), signal(NOW, "zz"))) == {"h": "zz"}
    assert states(probe(book, 3.0, signal(NOW, "zz"), signal(NOW, "aa"))) == {}


def test_it_is_unhealthy_since_it_became_so_whatever_the_reason_turns_into(book: HealthBook) -> None:
    probe(book, 1.0, signal(NOW, "one"))
    assert probe(book, 2.0, signal(NOW, "two")) == {"h": Health(State.UNHEALTHY, "two", "It is two.", 1.0)}


def test_signals_with_one_reason_and_other_words_are_all_told(book: HealthBook) -> None:
    probe(book, 0.0, signal(NOW, "port-down", message="Port 1."), signal(NOW, "port-down", message="Port 2."))
    assert [it.message for it in book.signals_of("h", 0.0)] == ["Port 1.", "Port 2."]
    assert probe(book, 1.0, signal(NOW, "port-down", message="Port 2."))["h"].message == "Port 2."


# --- while a pod holds it ---


def test_what_does_not_count_while_a_pod_holds_the_hardware_is_told_beside_what_does(book: HealthBook) -> None:
    moved = signal(NOW, "moved", unless_held=True)
    alone = probe(book, 1.0, moved)["h"]
    assert (alone.reason, alone.to_holder) == ("moved", HEALTHY)
    weak = probe(book, 2.0, moved, signal(DEGRADED, "weak"))["h"]
    assert (weak.reason, weak.to_holder.reason, weak.to_holder.state) == ("moved", "weak", State.DEGRADED)
    broken = probe(book, 3.0, moved, signal(NOW, "zz"))["h"]
    assert (broken.reason, broken.while_held) == ("zz", None)
    assert probe(book, 4.0) == {"h": HEALTHY}


def test_drained_hardware_is_drained_for_its_holder_too(book: HealthBook) -> None:
    probe(book, 1.0, signal(NOW, "moved", unless_held=True))
    drained = book.drain(["h"], "", None, 2.0, 2.0)["h"]
    assert drained.message == "an operator drained it; besides, it is Unhealthy with moved (It is moved)"
    assert drained.to_holder.message == "an operator drained it"


# --- what a person is told ---


def test_every_signal_is_told_with_its_date_what_ends_it_and_whether_it_counts(book: HealthBook) -> None:
    probe(book, 1.0, signal(DELAYED, "down", after=5.0), signal(INFO, "odd"))
    probe(book, 2.0, signal(DELAYED, "down", after=5.0), signal(INFO, "odd"), signal(NOW, "gone", recover_after=3.0))
    probe(book, 3.0, signal(DELAYED, "down", after=5.0), signal(INFO, "odd"))
    latch(book, 4.0, signal(DEGRADED, "xid-63", clears_on=[Clears.OPERATOR]))
    told = [(it.source, it.reason, it.since, it.counts, it.changes) for it in book.signals_of("h", 4.0)]
    assert told == [
        ("probe", "down", 1.0, False, 6.0),
        ("probe", "odd", 1.0, False, None),
        ("probe", "gone", 2.0, True, 6.0),
        ("record", "xid-63", 4.0, True, None),
    ]
    assert book.signals_of("h", 4.0)[-1].waits_for == {Clears.OPERATOR}
    assert book.signals_of("well", 4.0) == ()


def test_drain_and_quarantine_are_told_first(book: HealthBook) -> None:
    flap(book, 5)
    book.drain(["h"], "the fan", 1100.0, 10.0, 1000.0)
    told = [(it.source, it.reason, it.since, it.changes) for it in book.signals_of("h", 10.0)]
    assert told == [("operator", "drained", 10.0, 110.0), ("quarantine", "flapping", 8.0, 68.0)]


# --- time ---


def test_a_delayed_signal_that_says_the_same_with_other_words_goes_on_lasting(book: HealthBook) -> None:
    for now in range(6):
        probe(book, float(now), signal(DELAYED, "down", after=5.0, message=f"Down for {now} s."))
    assert book.of("h").message == "Down for 5 s."


def test_of_a_unit_that_is_not_looked_at_any_more_nothing_changes_but_by_time(book: HealthBook) -> None:
    probe(book, 0.0, signal(NOW, "sick"), unit="hung")
    probe(book, 0.0, signal(DELAYED, "down", "g", after=5.0), unit="hung too")
    assert states(book.ripen(1e9, 1e9)) == {"g": "down"}
    assert states(book.probed("fake", {"other": ()}, 1e9)) == {}


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_what_comes_and_goes_sooner_than_its_delay_never_counts(looks: list[bool]) -> None:
    book = HealthBook()
    for now, down in enumerate(looks):
        probe(book, float(now), *([signal(DELAYED, "down", after=3.0)] if down and now % 3 else []))
        assert book.ripen(now + 0.5, 0.0) == {}


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_what_counted_recovers_only_after_it_has_been_absent_for_as_long_as_it_says(looks: list[bool]) -> None:
    book, last = HealthBook(), 0
    probe(book, 0.0, signal(DEGRADED, "slow", recover_after=3.0))
    for now, slow in enumerate(looks, 1):
        probe(book, float(now), *([signal(DEGRADED, "slow", recover_after=3.0)] if slow else []))
        last = now if slow else last
        if slow or now < last + 4:  # seen absent first one second after it was seen last
            assert book.of("h").reason == "slow"
        else:
            assert book.of("h") is HEALTHY
            return


def test_a_delayed_signal_counts_once_it_has_lasted_and_starts_anew_after_a_gap(book: HealthBook) -> None:
    down = signal(DELAYED, "down", after=5.0)
    assert probe(book, 0.0, down) == {}
    assert book.next_deadline() == 5.0
    assert book.ripen(4.9, 4.9) == {}
    assert probe(book, 4.9) == {}
    assert probe(book, 5.0, down) == {}
    assert book.next_deadline() == 10.0
    assert states(book.ripen(10.0, 10.0)) == {"h": "down"}
    assert book.next_deadline() is None


def test_a_device_that_was_gone_does_not_come_back_with_a_delay_that_has_run_out(book: HealthBook) -> None:
    down = signal(DELAYED, "down", after=5.0)
    probe(book, 0.0, down)
    book.probed("fake", {"u": ()}, 1.0)  # as discovery says of a unit that is gone
    assert probe(book, 100.0, down) == {}


def test_recovery_takes_its_time_and_a_relapse_starts_it_anew(book: HealthBook) -> None:
    flapping = signal(NOW, "down", recover_after=10.0)
    probe(book, 0.0, flapping)
    assert probe(book, 1.0) == {}
    assert book.next_deadline() == 11.0
    assert probe(book, 5.0) == {}
    assert book.next_deadline() == 11.0
    assert probe(book, 9.0, flapping) == {}
    assert book.next_deadline() is None
    assert probe(book, 10.0) == {}
    assert book.ripen(19.9, 19.9) == {}
    assert book.ripen(20.0, 20.0) == {"h": HEALTHY}
    assert book.next_deadline() is None


def test_a_delayed_signal_that_counts_recovers_with_hysteresis_and_relapses_at_once(book: HealthBook) -> None:
    down = signal(DELAYED, "down", after=5.0, recover_after=10.0)
    probe(book, 0.0, down)
    assert states(book.ripen(5.0, 5.0)) == {"h": "down"}
    assert probe(book, 6.0) == {}
    assert probe(book, 7.0, down) == {}
    assert book.of("h").reason == "down"
    probe(book, 8.0)
    assert states(book.ripen(18.0, 18.0)) == {"h": "Healthy"}


def test_a_relapse_after_recovery_is_a_new_one_although_nobody_let_time_pass_in_between(book: HealthBook) -> None:
    down = signal(DELAYED, "down", after=5.0, recover_after=10.0)
    probe(book, 0.0, down)
    probe(book, 5.0, down)
    probe(book, 6.0)
    assert states(probe(book, 16.0, down)) == {"h": "Healthy"}
    assert book.next_deadline() == 21.0


def test_what_is_delayed_and_goes_on_from_what_counted_counts_at_once(book: HealthBook) -> None:
    down, waiting = (
        signal(DELAYED, reason, after=after, recover_after=5.0) for reason, after in (("down", 1.0), ("waiting", 30.0))
    )
    probe(book, 0.0, down)
    assert states(probe(book, 1.0, waiting)) == {"h": "down"}, "it had lasted, and nobody had said so yet"
    assert book.of("h").since == 1.0
    assert states(probe(book, 2.0, waiting)) == {}
    assert states(book.ripen(6.0, 6.0)) == {"h": "waiting"}
    assert book.next_deadline() is None
    assert states(probe(book, 7.0)) == {}
    assert states(book.ripen(12.0, 12.0)) == {"h": "Healthy"}
    assert states(probe(book, 12.0, waiting)) == {}
    assert book.next_deadline() == 42.0


def test_what_is_delayed_waits_where_what_counted_is_something_else() -> None:
    late = signal(DELAYED, "late", after=30.0, recover_after=5.0)
    for other in (signal(NOW, "broken"), signal(DEGRADED, "weak"), signal(DELAYED, "moved", unless_held=True)):
        book = HealthBook()
        probe(book, 0.0, other)
        probe(book, 1.0, late)
        assert book.of("h").to_holder is HEALTHY
    book = HealthBook()
    probe(book, 0.0, signal(DELAYED, "elsewhere"), unit="other")
    probe(book, 1.0, signal(DELAYED, "of another", "g"), late)
    assert states(probe(book, 2.0, unit="other")) == {"h": "Healthy"}


@given(st.floats(0, 1e6), st.floats(0.001, 1e3), st.sampled_from(["delayed", "record", "recovering"]))
def test_time_that_runs_to_the_deadline_is_always_enough(began: float, delay: float, what: str) -> None:
    book = HealthBook()
    if what == "delayed":
        probe(book, began, signal(DELAYED, after=delay))
    elif what == "record":
        latch(book, began, signal(DELAYED, after=delay))
    else:
        probe(book, began, signal(recover_after=delay))
        probe(book, began)
    deadline = book.next_deadline()
    if deadline is not None:  # None: the delay is lost in rounding
        assert book.ripen(deadline, deadline).keys() == {"h"}
        assert book.next_deadline() is None


# --- records ---


def test_what_a_record_says_latches_until_something_it_waits_for_happens(book: HealthBook) -> None:
    assert states(latch(book, 1.0, signal(clears_on=[Clears.REBIND, Clears.BOOT]))) == {"h": "sick"}
    assert probe(book, 2.0) == {}
    assert book.ripen(1e9, 1e9) == {}
    assert book.cleared(Clears.OPERATOR, ["h", "other"], 3.0) == {}
    assert book.cleared(Clears.REBIND, ["other"], 3.0) == {}
    assert states(book.cleared(Clears.REBIND, ["h"], 4.0)) == {"h": "Healthy"}


def test_a_worse_record_with_the_same_reason_is_not_swallowed_and_neither_softens_the_other(book: HealthBook) -> None:
    latch(book, 1.0, signal(DEGRADED, "xid", clears_on=[Clears.REBIND]))
    assert latch(book, 2.0, signal(NOW, "xid", clears_on=[Clears.BOOT]))["h"].state is State.UNHEALTHY
    assert latch(book, 3.0, signal(DEGRADED, "xid", clears_on=[Clears.REBIND])) == {}
    assert book.cleared(Clears.REBIND, ["h"], 4.0) == {}
    assert states(book.cleared(Clears.BOOT, ["h"], 5.0)) == {"h": "Healthy"}


def test_a_delayed_record_counts_once_it_has_lasted() -> None:
    book = HealthBook()
    assert latch(book, 1.0, signal(DELAYED, "port-error", after=5.0, clears_on=[Clears.RECOVERED])) == {}
    assert book.next_deadline() == 6.0
    assert states(book.ripen(6.0, 6.0)) == {"h": "port-error"}


def test_records_and_probes_about_one_thing_do_not_clear_each_other(book: HealthBook) -> None:
    latch(book, 1.0, signal(DEGRADED, "worn", clears_on=[Clears.BOOT]))
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
    assert not book._probes._active
    assert not book._probes.spoken
