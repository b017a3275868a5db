"""Keeps what the last probes of each unit said, and applies hysteresis.

What one look at a unit said is the whole truth the unit's probes know, and replaces what they said before. A unit
that is not looked at (its read hangs) keeps its signals: none ends, and delays go on. So do those that an earlier run of
ours saw, until its unit is looked at: a restart is no look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from agent.health.measured_values import Measures, Source
from agent.health.severity import counts, matured
from backends.base import Clears, Signal, Verdict

_KEPT: Final = frozenset({Verdict.NOW, Verdict.DELAYED, Verdict.DEGRADED})

_Kind = tuple[Source, str, Verdict, str]
"""Source, reason, verdict, and the name of the number behind it."""

_Key = tuple[_Kind, str]
"""Tells signals about one piece of hardware apart: kind and message."""


class Active(Struct, frozen=True):
    """A signal of a probe, since when it is seen, and since when it is no longer seen."""

    signal: Signal
    since: float
    gone_since: float | None = None
    at_once: bool = False
    """It is delayed and does not wait: it goes on from another that counted."""

    @property
    def waits_for(self) -> frozenset[Clears]:
        """It ends when it is no longer seen."""
        return frozenset()

    def verdict(self, now: float) -> Verdict:
        """What it means at this time."""
        if self.is_over(now):
            return Verdict.INFO
        return Verdict.NOW if self.at_once else matured(self.signal, self.since, now)

    def is_over(self, now: float) -> bool:
        """Has it been absent for long enough?"""
        return self.gone_since is not None and self.gone_since + self.signal.recover_after <= now

    @property
    def _waits(self) -> bool:
        return self.signal.verdict is Verdict.DELAYED and not self.at_once

    @property
    def begins(self) -> float:
        """When it begins to count, or began."""
        return self.since + self.signal.after if self._waits else self.since

    def deadline(self) -> float | None:
        """When time alone will change what it means; the same sums as above, so that none is missed by a rounding."""
        if self.gone_since is not None:
            return self.gone_since + self.signal.recover_after
        return self.begins if self._waits else None

    def leads_to(self, signal: Signal, now: float) -> bool:
        """Does it count after a delay that the other need not wait for again?

        What is delayed may be transient: a port that has been down for a minute is none the better for having a link and
        no subnet manager, although that by itself may last for half a minute. Hardware has recovered when none of it is
        seen any more.
        """
        lasted = self.signal.verdict is signal.verdict is Verdict.DELAYED and counts(self.verdict(now))
        return lasted and self.signal.unless_held <= signal.unless_held


class Sighting(Struct, frozen=True):
    """A signal and where it was seen, for the next run."""

    backend: str
    unit: str
    active: Active


class Probes:
    """The signals of all probes, by hardware."""

    def __init__(self) -> None:
        self._active: defaultdict[str, dict[_Key, Active]] = defaultdict(dict)
        self.spoken: dict[Source, frozenset[str]] = {}
        """The units whose signals are remembered, each with the hardware that these are about."""
        self.measures = Measures()
        self.revision = 0
        """Raised whenever what is kept changes."""
        self._looking: Set[str] | None = None  # the backends that have not looked at all their units yet; None: all
        self._looked: set[Source] = set()  # their units that they have looked at
        self._unseen: set[Source] = set()  # their units of which another run's signals count until they do

    def of(self, hardware: str) -> Iterable[Active]:
        """The signals about this hardware that count, or may yet."""
        return self._active[hardware].values() if hardware in self._active else ()

    def replace(self, source: Source, signals: Iterable[Signal], now: float) -> Set[str]:
        """Take what a unit's probes say for what they said before; the hardware concerned."""
        self._unseen.discard(source)
        seen: defaultdict[str, dict[_Key, Signal]] = defaultdict(dict)
        for signal in signals:
            if signal.measure is None or self.measures.counts(source, signal.hardware, signal.measure):
                seen[signal.hardware].setdefault(_key(source, signal), signal)
        touched = self.spoken.pop(source, frozenset()) | seen.keys()
        for hardware in touched:
            self._update(hardware, source, seen[hardware], now)
        if left := frozenset(h for h in touched if any(key[0][0] == source for key in self._active.get(h, ()))):
            self.spoken[source] = left
        return touched

    def _update(self, hardware: str, source: Source, seen: dict[_Key, Signal], now: float) -> None:
        active = self._active[hardware]
        known_before = _kept(active)
        before = [it for key, it in active.items() if key[0][0] == source]
        unseen = [key for key in active if key[0][0] == source and key not in seen]
        for key, signal in seen.items():
            known = active.get(key)
            if known is None and (renamed := next((old for old in unseen if old[0] == key[0]), None)):
                unseen.remove(renamed)  # the same signal, said with other words
                known = active.pop(renamed)
            known = None if known is None or known.is_over(now) else known
            at_once = any(it.leads_to(signal, now) for it in before if it is not known)
            active[key] = Active(
                signal, known.since if known else now, at_once=at_once or bool(known and known.at_once)
            )
        for key in unseen:
            self._fade(active, key, now)
        self.revision += _kept(active) != known_before
        self.settle(hardware, now)

    def _fade(self, active: dict[_Key, Active], key: _Key, now: float) -> None:
        """A signal is no longer seen: forget it, or see whether it stays away."""
        old = active[key]
        if not counts(old.verdict(now)):
            del active[key]
        elif old.gone_since is None:
            active[key] = replace(old, gone_since=now)

    def settle(self, hardware: str, now: float) -> None:
        """Forget what has been absent for long enough."""
        if (active := self._active.get(hardware)) is None:
            return
        for key in [key for key, it in active.items() if it.is_over(now)]:
            del active[key]
            self.revision += 1
        if not active:
            del self._active[hardware]

    # --- what outlives a restart ---

    def kept(self) -> tuple[Sighting, ...]:
        """Every signal that makes hardware Unhealthy or Degraded, now or later."""
        every = (item for active in self._active.values() for item in _kept(active).items())
        return tuple(Sighting(*key[0][0], it) for key, it in every)

    def restore(self, kept: Iterable[Sighting], now: float) -> Set[str]:
        """Take in what another run saw last; the hardware concerned. Our own looks know better what is there, not since when."""
        touched: set[str] = set()
        for it in kept:
            source, hardware = (it.backend, it.unit), it.active.signal.hardware
            theirs, active = replace(it.active, since=min(it.active.since, now)), self._active[hardware]
            if (ours := active.get(key := _key(source, theirs.signal))) is not None:
                at_once = ours.at_once or theirs.at_once
                active[key] = replace(ours, since=min(ours.since, theirs.since), at_once=at_once)
            else:
                active[key] = theirs
                if source in self._looked or not self._is_looking(it.backend):
                    self._fade(active, key, now)
                else:
                    self._unseen.add(source)
            self.spoken[source] = self.spoken.get(source, frozenset()) | {hardware}
            touched.add(hardware)
        return touched

    def look(self, backend: str, units: Iterable[str]) -> None:
        """Note that these units are being looked at."""
        if self._is_looking(backend):
            self._looked.update((backend, unit) for unit in units)

    def looked(self, looking: Set[str], now: float) -> Set[str]:
        """Note that every backend but these has looked at all its units; the hardware of units that were not there any more."""
        self._looking = looking
        self._looked = {source for source in self._looked if source[0] in looking}
        gone = [source for source in self._unseen if source[0] not in looking]
        return {hardware for source in gone for hardware in self.replace(source, (), now)}

    def _is_looking(self, backend: str) -> bool:
        """Is its first look at all units under way?"""
        return self._looking is None or backend in self._looking


def _kept(active: Mapping[_Key, Active]) -> dict[_Key, Active]:
    """Those of them that make hardware Unhealthy or Degraded, now or later."""
    return {key: it for key, it in active.items() if it.signal.verdict in _KEPT}


def _key(source: Source, signal: Signal) -> _Key:
    if signal.measure is not None:
        return (source, signal.reason, signal.verdict, signal.measure.name), ""
    return (source, signal.reason, signal.verdict, ""), signal.message
