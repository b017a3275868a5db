"""What records said, and what ends it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from agent.health import HealthBook, KeptHealth
from agent.model import HEALTHY, Health, State
from backends.base import Clears
from tests.health.said import BOOT, DEGRADED, FINE, INFO, NOW, bound, find, latch, record, signal, states

REBIND, RECOVERED, RESET, OPERATOR = Clears.REBIND, Clears.RECOVERED, Clears.OUR_RESET, Clears.OPERATOR
XID = signal(NOW, "xid-79", clears_on=[REBIND, RECOVERED, RESET, Clears.BOOT, OPERATOR])


def restart(book: HealthBook, now: float, boot: str = BOOT) -> HealthBook:
    after = HealthBook(boot)
    after.restore(book.kept(), now, now)
    return after


@pytest.mark.parametrize(
    "end",
    [
        lambda book: find(book, 2.0, "new"),
        lambda book: latch(book, 2.0, signal(FINE, "recovered", clears_on=[RECOVERED])),
        lambda book: book.cleared(RESET, ["h"], 2.0),
        lambda book: book.undrain(["h"], 2.0),
    ],
    ids=["rebind", "recovery", "reset", "operator"],
)
def test_each_thing_that_it_waits_for_ends_it(book: HealthBook, end: Callable[[HealthBook], dict[str, object]]) -> None:
    find(book, 0.0, "old")
    assert states(latch(book, 1.0, XID)) == {"h": "xid-79"}
    assert end(book) == {"h": HEALTHY}
    assert book.kept().latches == ()


def test_what_it_does_not_wait_for_leaves_it(book: HealthBook) -> None:
    find(book, 0.0, "old")
    latch(book, 1.0, signal(clears_on=[Clears.BOOT]))
    assert find(book, 2.0, "new") == {}
    assert latch(book, 2.0, signal(FINE, clears_on=[RECOVERED])) == {}
    assert book.cleared(RESET, ["h"], 2.0) == {}
    assert book.undrain(["h"], 2.0) == {}
    assert book.of("h").state is State.UNHEALTHY


def test_a_recovery_ends_what_was_said_of_its_own_hardware_alone(book: HealthBook) -> None:
    latch(book, 1.0, XID, signal(NOW, "xid-79", "other", clears_on=[RECOVERED]))
    latch(book, 2.0, signal(FINE, clears_on=[RECOVERED]))
    assert (book.of("h"), book.of("other").reason) == (HEALTHY, "xid-79")


def test_fine_without_saying_what_has_happened_ends_nothing(book: HealthBook) -> None:
    latch(book, 1.0, XID)
    assert latch(book, 2.0, signal(FINE)) == {}


def test_a_record_that_does_not_say_what_ends_it_waits_for_an_operator_or_a_boot(book: HealthBook) -> None:
    latch(book, 1.0, signal())
    assert restart(book, 2.0, "boot 2").of("h") is HEALTHY
    assert book.undrain(["h"], 2.0) == {"h": HEALTHY}


def test_lines_by_the_thousand_with_other_words_are_one_latch_with_the_first_words(book: HealthBook) -> None:
    assert latch(book, 1.0, signal(NOW, "xid-79", message="pid 0"), sequence=0) != {}
    for sequence in range(1, 1000):
        assert latch(book, 1.0 + sequence, signal(NOW, "xid-79", message=f"pid {sequence}"), sequence=sequence) == {}
    (kept,) = book.kept().latches
    assert (kept.signal.message, kept.since, kept.sequence) == ("pid 0", 1.0, 999)


# --- bindings ---


LINE, RESTART = "the kernel logs an error", "we are restarted"


@pytest.mark.parametrize(
    ("ends", "events"),
    [
        # one backend
        (False, ["gpu: old", LINE, "gpu: old"]),
        (False, [LINE, "gpu: first"]),  # it was not known: the first that is seen is taken for it
        (True, [LINE, "gpu: first", "gpu: second"]),
        (True, ["gpu: old", LINE, "gpu: gone", "gpu: new"]),
        (False, ["gpu: old", LINE, RESTART, "gpu: old"]),
        (True, ["gpu: old", LINE, RESTART, "gpu: new"]),
        (False, ["gpu: old", "gpu: none", LINE, "gpu: new"]),  # it belongs to the new: its driver's probe fails
        (False, ["gpu: old", LINE, "gpu: none", LINE, "gpu: new"]),
        # whoever looks
        (False, ["gpu: old", LINE, "vfio: old", RESTART, "vfio: old"]),
        (True, ["gpu: old", LINE, "vfio: old", RESTART, "vfio: new"]),
        (False, ["gpu: old", "vfio: old", LINE, "gpu: new"]),  # it ends once the last has seen the new
        (True, ["gpu: old", "vfio: old", LINE, "gpu: new", "vfio: new"]),
        (True, ["gpu: old", "vfio: old", LINE, "gpu: new", "vfio: gone"]),
        (False, ["gpu: old", "vfio: old", "gpu: new", LINE, "vfio: new", "gpu: newer"]),  # it was said of the new
        (True, ["gpu: old", "vfio: old", "gpu: new", LINE, "vfio: new", "gpu: newer", "vfio: newer"]),
        (False, ["gpu: new", LINE, "vfio: old", "vfio: new"]),  # vfio read it before, and tells it after
        (False, ["gpu: nvidia 1", LINE, "odd: group 7"]),  # bindings of its own
        (True, ["gpu: nvidia 1", LINE, "odd: group 7", "gpu: nvidia 2"]),
        # a binding alone says nothing
        (False, ["gpu: one", "gpu: none", "gpu: two", "gpu: three"]),
    ],
    ids=lambda of: ", ".join(of) if isinstance(of, list) else "ends" if of else "stays",
)
def test_a_latch_ends_with_the_last_of_what_is_seen_or_stays(ends: bool, events: list[str]) -> None:
    book, changes = HealthBook(BOOT), dict[str, Health]()
    for now, event in enumerate(events):
        assert changes == {}
        if event == LINE:
            latch(book, float(now), XID, sequence=now)
        elif event == RESTART:
            book = restart(book, float(now))
        else:
            backend, binding = event.split(": ")
            devices = [] if binding == "gone" else [bound("" if binding == "none" else binding)]
            changes = book.found(backend, {"h": devices}, float(now))
    assert changes == ({"h": HEALTHY} if ends else {})
    assert book.of("h").reason == ("xid-79" if LINE in events and not ends else "")


OLD_FILE = b"""{"boot": "boot 1", "latches": [{
    "signal": {"hardware": "h", "reason": "xid-79", "verdict": "now", "message": "m", "clears_on": ["rebind"]},
    "since": 1.0, "source": "kmsg", "boot": "boot 1", "sequence": 7,
    "bindings": {"gpu": "nvidia:1700:1600", "vfio": "snd_hda_intel:1650:1590"}
}]}"""
"""As it was kept when each backend had bindings of its own, and vfio one for a whole group."""


@pytest.mark.parametrize(
    ("backend", "binding", "ends"),
    [("gpu", "nvidia:1700:1600", False), ("vfio", "nvidia:1700:1600", False), ("vfio", "vfio-pci:1800:1600", True)],
)
def test_what_was_kept_before_bindings_were_the_hardwares_is_still_read(
    book: HealthBook, backend: str, binding: str, ends: bool
) -> None:
    book.restore(msgspec.json.decode(OLD_FILE, type=KeptHealth), 2.0, 2.0)
    assert book.of("h").reason == "xid-79"
    assert states(find(book, 3.0, binding, backend=backend)) == ({"h": "Healthy"} if ends else {})


# --- restarts and boots ---


def test_a_restart_forgets_nothing_that_a_record_said(book: HealthBook) -> None:
    latch(book, 1.0, XID, signal(DEGRADED, "worn", "g", clears_on=[OPERATOR]), signal(INFO, "odd", "i"))
    after = restart(book, 9.0)
    for hardware in ("h", "g", "i"):
        assert after.of(hardware) == book.of(hardware)
        assert after.signals_of(hardware, 9.0) == book.signals_of(hardware, 9.0)


@pytest.mark.parametrize("waits_for", [[Clears.BOOT], [REBIND], [RESET, Clears.BOOT], []])
def test_a_boot_ends_what_waits_for_it_or_for_a_driver_to_be_bound(book: HealthBook, waits_for: list[Clears]) -> None:
    latch(book, 1.0, signal(clears_on=waits_for))
    assert restart(book, 2.0).of("h").state is State.UNHEALTHY
    assert restart(book, 2.0, "boot 2").of("h") is HEALTHY


def test_what_an_operator_must_see_outlives_a_boot_and_is_dated_anew(book: HealthBook) -> None:
    latch(book, 9000.0, signal(clears_on=[OPERATOR]))
    after = restart(book, 5.0, "boot 2")
    assert (after.of("h").state, after.of("h").since) == (State.UNHEALTHY, 5.0)
    assert restart(after, 6.0, "boot 3").of("h").state is State.UNHEALTHY


def test_how_far_the_records_were_read_is_kept_for_each_source_of_this_boot(book: HealthBook) -> None:
    for sequence in (3, 9, 5):
        latch(book, 1.0, XID, sequence=sequence)
    book.recorded([signal(FINE)], record(4, source="uevent"), 1.0)
    after = restart(book, 2.0)
    assert {name: it.sequence for name, it in after.handled.items()} == {"kmsg": 9, "uevent": 4}
    assert restart(book, 2.0, "boot 2").handled == {}


def test_of_an_agent_that_was_beside_us_what_it_had_cleared_is_cleared_and_what_it_never_heard_stays() -> None:
    theirs, ours = HealthBook(BOOT), HealthBook(BOOT)
    for book in (theirs, ours):
        latch(book, 1.0, XID, sequence=1)
        latch(book, 1.0, signal(NOW, "xid-48", "g", clears_on=[OPERATOR]), sequence=2)
    theirs.cleared(RESET, ["h"], 2.0)
    latch(ours, 3.0, signal(NOW, "xid-63", "i"), sequence=3)
    assert states(ours.restore(theirs.kept(), 4.0, 4.0)) == {"h": "Healthy"}
    assert (ours.of("g").reason, ours.of("i").reason) == ("xid-48", "xid-63")


def test_a_rebind_that_was_seen_before_the_file_was_read_ends_the_latch_too(book: HealthBook) -> None:
    find(book, 0.0, "old")
    latch(book, 1.0, XID)
    after = HealthBook(BOOT)
    find(after, 2.0, "new")
    assert after.restore(book.kept(), 3.0, 3.0) == {}
    assert after.of("h") is HEALTHY


# --- what a starting pod is told ---


def test_to_its_holder_hardware_is_as_records_and_probes_say_or_as_a_reset_would_leave_it(book: HealthBook) -> None:
    latch(book, 1.0, XID, signal(NOW, "worn-out", "g", clears_on=[OPERATOR]))
    book.probed("fake", {"u": [signal(NOW, "moved", "i", unless_held=True)]}, 1.0)
    book.drain(["d"], "", None, 1.0, 1.0)
    assert book.for_pod("h", 2.0).reason == "xid-79"
    assert book.for_pod("h", 2.0, RESET) is HEALTHY
    assert book.for_pod("g", 2.0, RESET).reason == "worn-out"
    assert book.for_pod("i", 2.0) is HEALTHY
    assert book.for_pod("d", 2.0) is HEALTHY


def test_what_is_recorded_in_the_moment_of_a_restart_does_not_date_the_drain_anew() -> None:
    first = HealthBook(BOOT)
    first.drain(["h"], "why", None, 12.0, 1e9 + 12.0)
    book = HealthBook(BOOT)
    book.restore(first.kept(), 24.0, 1e9 + 24.0)
    latch(book, 24.0, signal(DEGRADED, "slow", clears_on=[Clears.BOOT]))
    assert book.of("h").since == 12.0
