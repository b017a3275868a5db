"""Keeps what the last probes of each unit said, and applies hysteresis.

What one look at a unit said is the whole truth the unit's probes know, and replaces what they said before. A unit
that is not looked at (its read hangs) keeps its signals: none ends, and delays go on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set

from msgspec import Struct
from msgspec.structs import replace

from agent.health.measured_values import Measures, Source
from agent.health.severity import counts, matured
from backends.base import Clears, Signal, Verdict

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

    def deadline(self) -> float | None:
        """When time alone will change what it means; the same sums as above, so that none is missed by a rounding."""
        if self.gone_since is not None:
            return self.gone_since + self.signal.recover_after
        waits = self.signal.verdict is Verdict.DELAYED and not self.at_once
        return self.since + self.signal.after if waits else None

    def leads_to(self, signal: Signal, now: float) -> bool:
        """Does it count after a delay that the other need not wait for again?

        What is delayed may be transient: a port that has been down for a minute is none the better for having a link and
        no subnet manager, although that by itself may last for half a minute. Hardware has recovered when none of it is
        seen any more.
        """
        lasted = self.signal.verdict is signal.verdict is Verdict.DELAYED and counts(self.verdict(now))
        return lasted and self.signal.unless_held <= signal.unless_held


class Probes:
    """The signals of all probes, by hardware."""

    def __init__(self) -> None:
        self._active: defaultdict[str, dict[_Key, Active]] = defaultdict(dict)
        self.spoken: dict[Source, frozenset[str]] = {}
        """The units whose signals are remembered, each with the hardware that these are about."""
        self.measures = Measures()

    def of(self, hardware: str) -> Iterable[Active]:
        """The signals about this hardware that count, or may yet."""
        return self._active[hardware].values() if hardware in self._active else ()

    def replace(self, source: Source, signals: Iterable[Signal], now: float) -> Set[str]:
        """Take what a unit's probes say for what they said before; the hardware concerned."""
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
        before = [it for key, it in active.items() if key[0][0] == source]
        unseen = [key for key in active if key[0][0] == source and key not in seen]
        for key, signal in seen.items():
            known = active.get(key)
            if known is None and (renamed := next((old for old in unseen if old[0] == key[0]), None)):
                unseen.remove(renamed)  # the same signal, said with other words
                known = active.pop(renamed)
            since = known.since if known and not known.is_over(now) else now
            active[key] = Active(signal, since, at_once=any(it.leads_to(signal, now) for it in before))
        for key in unseen:
            self._fade(active, key, now)
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
        if not active:
            del self._active[hardware]


def _key(source: Source, signal: Signal) -> _Key:
    if signal.measure is not None:
        return (source, signal.reason, signal.verdict, signal.measure.name), ""
    return (source, signal.reason, signal.verdict, ""), signal.message
