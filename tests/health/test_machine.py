"""Any sequence of what can happen to hardware keeps the rules of health."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent.health import HealthBook
from agent.model import HEALTHY, Health, State
from backends.base import Clears, Signal, Verdict
from tests.health.said import DELAYED, NOW, bound, number, record, signal

HARDWARE: Final = ("pci:h", "usb:g")
UNITS: Final = ("u", "v")
FOREVER: Final = 1e7  # seconds: longer than any delay or quarantine

verdicts = st.sampled_from(list(Verdict))
seconds = st.sampled_from([0.0, 1.0, 5.0])
some_hardware = st.sampled_from(HARDWARE)
some = st.sets(some_hardware, min_size=1)
clears = st.sets(st.sampled_from([it for it in Clears if it is not Clears.RECOVERED]))  # each of which can happen here
probed = st.one_of(
    st.builds(
        lambda *a, after, recover, held: signal(*a, after=after, recover_after=recover, unless_held=held),
        verdicts, st.sampled_from(["r", "s"]), some_hardware, after=seconds, recover=seconds, held=st.booleans(),
    ),
    st.builds(
        lambda value, hardware, recover: number(value, hardware=hardware, recover_after=recover),
        st.integers(0, 3), some_hardware, seconds,
    ),
)  # fmt: skip
recorded = st.builds(
    lambda *a, clears_on, after: signal(*a, clears_on=clears_on, after=after),
    verdicts, st.sampled_from(["x", "y"]), some_hardware, clears_on=clears, after=seconds,
)  # fmt: skip


class Machine(RuleBasedStateMachine):
    """One book is told everything in one call, the other piece by piece; a third is the last run's heir."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.pieces = HealthBook("boot"), HealthBook("boot")
        self.now, self.offset, self.sequence = 0.0, 1e9, 0
        self.told: dict[str, Health] = {}
        self.probed: dict[str, tuple[Signal, ...]] = {}

    @property
    def books(self) -> tuple[HealthBook, HealthBook]:
        return self.whole, self.pieces

    def take(self, changes: dict[str, Health]) -> None:
        for hardware, health in changes.items():
            assert not self.told.get(hardware, HEALTHY).says_same(health)
        self.told |= changes

    # --- what happens ---

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 4.0, 30.0, 100.0, 700.0, 5000.0, 1e5]))
    def time_passes(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.whole.next_deadline()) is not None and due <= end:
            assert due > self.now
            self.now = due
            self._ripen()
        self.now = end
        self._ripen()

    def _ripen(self) -> None:
        self.take(self.whole.ripen(self.now, self.now + self.offset))
        self.pieces.ripen(self.now, self.now + self.offset)

    @rule(units=st.dictionaries(st.sampled_from(UNITS), st.lists(probed, max_size=3), min_size=1))
    def units_are_probed(self, units: dict[str, list[Signal]]) -> None:
        self.take(self.whole.probed("fake", units, self.now))
        for unit, signals in units.items():
            self.pieces.probed("fake", {unit: signals}, self.now)
        self.probed |= {unit: tuple(signals) for unit, signals in units.items()}

    @rule(times=st.integers(1, 6), hardware=some_hardware)
    def it_flaps(self, times: int, hardware: str) -> None:
        for _ in range(times):
            for signals in ([signal(NOW, "flap", hardware)], []):
                self.now += 1.0
                self._ripen()
                self.units_are_probed({"u": signals})

    # one record never says of hardware both that something is wrong and that it is over, which in two would be one return more
    @rule(
        signals=st.lists(recorded, min_size=1, max_size=2, unique_by=lambda it: (it.hardware, it.reason)).filter(
            lambda signals: (
                len({it.hardware for it in signals})
                == len({(it.hardware, it.verdict is Verdict.FINE) for it in signals})
            )
        )
    )
    def a_record_comes(self, signals: list[Signal]) -> None:
        self.sequence += 1
        told = record(self.sequence, boot="boot")
        self.take(self.whole.recorded(signals, told, self.now))
        for said in signals:
            self.pieces.recorded([said], told, self.now)

    @rule(
        bindings=st.dictionaries(some_hardware, st.sampled_from(["", "one", "two"]), min_size=1),
        gone=st.booleans(),
        by_another=st.booleans(),
        ours=st.booleans(),
    )
    def devices_are_found(self, bindings: dict[str, str], gone: bool, by_another: bool, ours: bool) -> None:
        units = {h: [] if gone else [bound(binding, h)] for h, binding in bindings.items()}
        self.take(self.whole.found("fake", units, self.now, by_another=by_another, ours=lambda: ours))
        for unit, devices in units.items():
            self.pieces.found("fake", {unit: devices}, self.now, by_another=by_another, ours=lambda: ours)
            by_another = False  # one exchange has been told once

    @rule(times=st.integers(1, 6), hardware=some)
    def it_comes_and_goes(self, times: int, hardware: Iterable[str]) -> None:
        for _ in range(times):
            for gone in (False, True):
                self.now += 1.0
                self._ripen()
                self.devices_are_found(dict.fromkeys(hardware, ""), gone, by_another=False, ours=False)

    @rule(by=st.sampled_from(list(Clears)), hardware=some)
    def something_clears(self, by: Clears, hardware: Iterable[str]) -> None:
        self.take(self.whole.cleared(by, hardware, self.now))
        for name in hardware:
            self.pieces.cleared(by, [name], self.now)

    @rule(hardware=some, lasts=st.sampled_from([None, 1.0, 50.0, 500.0]))
    def an_operator_drains(self, hardware: Iterable[str], lasts: float | None) -> None:
        wall = self.now + self.offset
        until = None if lasts is None else wall + lasts
        self.take(self.whole.drain(hardware, "why", until, self.now, wall))
        for name in hardware:
            self.pieces.drain([name], "why", until, self.now, wall)

    @rule(hardware=some)
    def an_operator_undrains(self, hardware: Iterable[str]) -> None:
        self.take(self.whole.undrain(hardware, self.now))
        for name in hardware:
            self.pieces.undrain([name], self.now)

    @rule(seconds=st.sampled_from([-1e4, -10.0, 10.0, 1e4]))
    def the_wall_clock_is_set(self, seconds: float) -> None:
        self.offset += seconds

    @rule()
    def we_are_restarted(self) -> None:
        before = {hardware: self.whole.of(hardware) for hardware in HARDWARE}
        kept = self.whole.kept()
        for drawn in ("whole", "pieces"):
            book = HealthBook("boot")
            book.restore(kept, self.now, self.now + self.offset)
            assert book.kept().drains == tuple(d for d in kept.drains if not d.is_over(self.now + self.offset))
            book.probed("fake", self.probed, self.now)
            setattr(self, drawn, book)
        for hardware, health in before.items():
            if health.reason in ("x", "y", "flapping"):  # what only we knew
                assert self.whole.of(hardware).state is State.UNHEALTHY or health.state is not State.UNHEALTHY
        self.told = {hardware: self.whole.of(hardware) for hardware in HARDWARE}

    # --- the rules ---

    @invariant()
    def every_change_was_told(self) -> None:
        for hardware in HARDWARE:
            assert self.whole.of(hardware) == self.told.get(hardware, HEALTHY)

    @invariant()
    def in_one_call_or_in_many_it_comes_to_the_same(self) -> None:
        assert self.whole.next_deadline() == self.pieces.next_deadline()
        for hardware in HARDWARE:
            one, other = self.whole.of(hardware), self.pieces.of(hardware)
            assert (one.state, one.reason, one.since) == (other.state, other.reason, other.since)
            assert one.to_holder.state is other.to_holder.state

    @invariant()
    def what_counts_makes_the_state_and_nothing_else_does(self) -> None:
        for hardware in HARDWARE:
            health, said = self.whole.of(hardware), self.whole.signals_of(hardware, self.now)
            counting = [it for it in said if it.counts]
            bad = [it for it in counting if it.verdict in (NOW, DELAYED)]
            assert (health.state is State.UNHEALTHY) == bool(bad)
            assert (health is HEALTHY) == (not counting)
            assert health.state is State.HEALTHY or (health.reason and health.message)
            assert health.to_holder.offered or any(not it.unless_held for it in bad)
            assert health.since <= self.now

    @invariant()
    def what_a_probe_says_now_counts_now_and_what_it_delays_does_not_count_before(self) -> None:
        for hardware in HARDWARE:
            mine = [s for signals in self.probed.values() for s in signals if s.hardware == hardware]
            if any(s.verdict is NOW and s.measure is None for s in mine):
                assert self.whole.of(hardware).state is State.UNHEALTHY
            for it in self.whole.signals_of(hardware, self.now):
                if it.verdict is DELAYED and it.counts:
                    assert it.since < self.now or any(s.after == 0.0 for s in [*mine, signal()])
                assert it.source == "operator" or it.changes is None or it.changes > self.now

    @invariant()
    def it_is_as_a_restart_would_have_it(self) -> None:
        after = HealthBook("boot")
        wall = self.now + self.offset
        after.restore(self.whole.kept(), self.now, wall)
        after.probed("fake", self.probed, self.now)
        for hardware in HARDWARE:
            assert _kept(after, hardware, self.now) == [
                it
                for it in _kept(self.whole, hardware, self.now)
                if it[1] != "drained" or _lasts(self.whole, hardware, wall)
            ]

    @rule()
    def there_is_a_way_back_to_health(self) -> None:
        """Repair everything, wait, give an operator's word, and boot: all is well, and nothing is left over."""
        self.take(self.whole.probed("fake", dict.fromkeys(UNITS, ()), self.now))
        self.take(self.whole.undrain(HARDWARE, self.now))
        for by in Clears:
            self.take(self.whole.cleared(by, HARDWARE, self.now))
        self.now += FOREVER
        self.take(self.whole.ripen(self.now, self.now + self.offset))
        assert all(self.whole.of(hardware) is HEALTHY for hardware in HARDWARE)
        assert not any(self.whole.signals_of(hardware, self.now) for hardware in HARDWARE)
        kept = self.whole.kept()
        assert (kept.drains, kept.latches, kept.quarantines) == ((), (), ())
        self.probed = {}
        self.whole, self.pieces, self.told = HealthBook("boot"), HealthBook("boot"), {}


def _kept(book: HealthBook, hardware: str, now: float) -> list[tuple[object, ...]]:
    said = [it for it in book.signals_of(hardware, now) if it.source != "probe"]
    return sorted(
        (it.source != "operator" and it.since, it.reason, it.message, it.verdict.value, it.counts) for it in said
    )


def _lasts(book: HealthBook, hardware: str, wall: float) -> bool:
    return any(drain.hardware == hardware and not drain.is_over(wall) for drain in book.kept().drains)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
