from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.discovery.backend_answers import NonsenseError, signals
from agent.discovery.runner import WITHIN, Faults, Report, told, wants
from backends.base import ANY_SUBSYSTEM, Record, Signal, Verdict, Watches

LINE = Record("kmsg", "b", 1, 1.0, "NVRM: Xid (PCI:0000:3b:00): 79", {"SUBSYSTEM": "pci"})
EVENT = Record("uevent", "b", 1, 1.0, "/devices/pci0", {"SUBSYSTEM": "pci", "ERROR_EVENT": "BEGIN_RECOVERY"})


@pytest.mark.parametrize(
    ("record", "watches", "wanted"),
    [
        (LINE, Watches(kernel_lines=frozenset({"amdgpu", "NVRM: Xid"})), True),
        (LINE, Watches(kernel_lines=frozenset({"amdgpu"})), False),
        (LINE, Watches(frozenset({ANY_SUBSYSTEM}), facts=frozenset({"SUBSYSTEM"})), False),
        (LINE, Watches(), False),
        (EVENT, Watches(frozenset({"pci"}), facts=frozenset({"WEDGED", "ERROR_EVENT"})), True),
        (EVENT, Watches(frozenset({ANY_SUBSYSTEM}), facts=frozenset({"ERROR_EVENT"})), True),
        (EVENT, Watches(frozenset({"drm"}), facts=frozenset({"ERROR_EVENT"})), False),
        (EVENT, Watches(frozenset({"pci"}), facts=frozenset({"WEDGED"})), False),
        (EVENT, Watches(frozenset({"pci"}), kernel_lines=frozenset({"pci0"})), False),
    ],
)
def test_a_backend_gets_the_records_that_it_asked_for(record: Record, watches: Watches, wanted: bool) -> None:
    assert wants(watches, record) is wanted


def test_what_a_record_means_may_be_said_one_by_one_and_is_checked() -> None:
    said = Signal("d", "xid-79", Verdict.NOW, "It fell off the bus.")
    assert signals("signals", iter([said])) == (said,)
    with pytest.raises(NonsenseError, match=r"signals\(\) returned 'more' where a Signal is due"):
        signals("signals", [said, "more"])


# --- one fault, several witnesses ---


@st.composite
def faults(draw: st.DrawFn) -> list[tuple[float, str, int]]:
    """Reports (time, source, which fault), sorted: each fault is told by some sources, each within the window."""
    found: list[tuple[float, str, int]] = []
    for number in range(draw(st.integers(1, 8))):
        began = draw(st.floats(0, 3 * WITHIN))
        sources = draw(st.sets(st.sampled_from(["kmsg", "nvml", "nvml-ecc"]), min_size=1))
        found.extend((began + draw(st.floats(0, WITHIN / 2)), source, number) for source in sources)
    return sorted(found)


@given(faults())
def test_a_fault_that_several_witnesses_tell_is_told_once_in_whatever_order(
    reports: list[tuple[float, str, int]],
) -> None:
    """No source's word is lost: there are as many faults as the one that heard most within a window says, or more."""
    known: tuple[Report, ...] = ()
    news = Counter[str]()
    for now, source, _ in reports:
        known, is_news = told(known, source, Verdict.NOW, now)
        news["all"] += is_news
        news[source] += 1
    assert max(news[source] for source in news.keys() - {"all"}) <= news["all"] <= len(reports)


@given(st.integers(1, 20), st.floats(0, WITHIN / 2), st.booleans(), st.data())
def test_as_many_faults_are_told_as_both_witnesses_heard(
    count: int, lag: float, late_log: bool, data: st.DataObject
) -> None:
    began = sorted(data.draw(st.lists(st.floats(0, 100), min_size=count, max_size=count)))
    late, early = ("kmsg", "nvml") if late_log else ("nvml", "kmsg")
    reports = sorted([*((at, 0, early) for at in began), *((at + lag, 1, late) for at in began)])
    known: tuple[Report, ...] = ()
    told_as_new = 0
    for now, _, source in reports:
        known, is_news = told(known, source, Verdict.NOW, now)
        told_as_new += is_news
    assert told_as_new == count


def test_what_another_source_says_worse_of_a_fault_is_news() -> None:
    """NVML has a number alone; the log says that the error was fatal, or what the GPU needs now."""
    it = Faults()
    mild = Signal("pci:0000:3b:00.0", "xid-154", Verdict.INFO, "…", fault="xid-154 of 0000:3b:00.0")
    assert it.note(mild, "nvml", 1.0)
    assert it.note(replace(mild, verdict=Verdict.NOW), "kmsg", 1.1)
    assert not it.note(replace(mild, hardware="mig:0000:3b:00.0/gi1"), "nvml-ecc", 1.2)
    assert it.note(mild, "nvml", 1.3)  # once more


def test_what_only_one_witness_hears_is_told_each_time_however_much_there_is() -> None:
    it = Faults()
    for number in range(1000):
        signal = Signal("d", "xid-31", Verdict.NOTE, "…", fault=f"xid-31 of {number % 500}")
        assert it.note(signal, "kmsg", number / 1000)
    assert len(it._reports) <= 256
    assert it.note(replace(signal, fault=""), "nvml", 1.0)
