"""Merges what probes and records say into one health for each piece of hardware.

Pure: `now` is seconds on one monotonic clock, handed in. What the probes of a unit say is the whole truth they know
at that moment and replaces what they said before; signals of records latch until something in their `clears_on`
happens. Each method returns the hardware whose health changed, with its new health.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from agent.devices.model import HEALTHY, Health, State
from backends.base import Clears, Signal, Verdict

_Source = tuple[str, str] | None
"""Who says it: backend and unit; None: a record."""

_Key = tuple[_Source, str, Verdict]
"""Tells signals about one piece of hardware apart: source, reason, verdict."""


@dataclass(frozen=True, slots=True)
class _Active:
    """A signal that counts, since when, and since when it is no longer seen (hysteresis)."""

    signal: Signal
    since: float
    gone_since: float | None = None

    def verdict(self, now: float) -> Verdict:
        """What it means at this time: a DELAYED signal is NOW once it has lasted."""
        if self.is_over(now):
            return Verdict.INFO
        if self.signal.verdict is Verdict.DELAYED:
            return Verdict.NOW if self.since + self.signal.after <= now else Verdict.INFO
        return self.signal.verdict

    def is_over(self, now: float) -> bool:
        """Has it been absent for long enough?"""
        return self.gone_since is not None and self.gone_since + self.signal.recover_after <= now

    def deadline(self) -> float | None:
        """When time alone will change what it means; the same sums as above, so that none is missed by a rounding."""
        if self.gone_since is not None:
            return self.gone_since + self.signal.recover_after
        return self.since + self.signal.after if self.signal.verdict is Verdict.DELAYED else None


_STATES = {Verdict.NOW: State.UNHEALTHY, Verdict.DEGRADED: State.DEGRADED}


class HealthBook:
    """The health of all hardware; the only one who decides it."""

    def __init__(self) -> None:
        self._active: defaultdict[str, dict[_Key, _Active]] = defaultdict(dict)  # by hardware
        self._spoken: dict[_Source, frozenset[str]] = {}  # the hardware that a unit's probes complained of
        self._health: dict[str, Health] = {}

    def of(self, hardware: str) -> Health:
        """The health of this hardware; what nobody complained of is healthy."""
        return self._health.get(hardware, HEALTHY)

    def probed(self, backend: str, units: Mapping[str, Iterable[Signal]], now: float) -> dict[str, Health]:
        """These units of a backend were probed, and this is all there is to see; nothing is of a unit that is gone."""
        touched: set[str] = set()
        for unit, signals in units.items():
            if signals or (backend, unit) in self._spoken:
                touched |= self._replace((backend, unit), signals, now)
        return self._judge(touched, now)

    def _replace(self, source: _Source, signals: Iterable[Signal], now: float) -> frozenset[str]:
        """Take what a unit's probes say for what they said before; the hardware concerned."""
        seen: defaultdict[str, dict[_Key, Signal]] = defaultdict(dict)
        for signal in signals:
            seen[signal.hardware].setdefault((source, signal.reason, signal.verdict), signal)
        touched = self._spoken.pop(source, frozenset()) | seen.keys()
        for hardware in touched:
            for key in [key for key in self._active[hardware] if key[0] == source and key not in seen[hardware]]:
                self._fade(hardware, key, now)
            for key, signal in seen[hardware].items():
                known = self._active[hardware].get(key)
                since = known.since if known and not known.is_over(now) else now
                self._active[hardware][key] = _Active(signal, since)
            self._tidy(hardware)
        left = frozenset(h for h in touched if any(key[0] == source for key in self._active.get(h, ())))
        if left:
            self._spoken[source] = left
        return touched

    def _fade(self, hardware: str, key: _Key, now: float) -> None:
        """A signal is no longer seen: forget it, or see whether it stays away."""
        old = self._active[hardware][key]
        if old.signal.recover_after > 0 and old.verdict(now) is Verdict.NOW:
            gone_since = now if old.gone_since is None else old.gone_since
            self._active[hardware][key] = replace(old, gone_since=gone_since)
        else:
            del self._active[hardware][key]

    def recorded(self, signals: Iterable[Signal], now: float) -> dict[str, Health]:
        """A record said this: it holds until cleared."""
        touched = set()
        for signal in signals:
            self._active[signal.hardware].setdefault((None, signal.reason, signal.verdict), _Active(signal, now))
            touched.add(signal.hardware)
        return self._judge(touched, now)

    def cleared(self, by: Clears, hardware: Iterable[str], now: float) -> dict[str, Health]:
        """Something happened to this hardware that ends the latched signals that wait for it."""
        touched = set(hardware) & self._active.keys()
        for name in touched:
            active = self._active[name]
            for key in [key for key, a in active.items() if key[0] is None and by in a.signal.clears_on]:
                del active[key]
            self._tidy(name)
        return self._judge(touched, now)

    def next_deadline(self, now: float) -> float | None:
        """When time alone will next change something; None if it will not."""
        deadlines = (active.deadline() for actives in self._active.values() for active in actives.values())
        return min((deadline for deadline in deadlines if deadline is not None and deadline > now), default=None)

    def ripen(self, now: float) -> dict[str, Health]:
        """Time has passed: delayed signals that lasted count, recovered ones are forgotten."""
        touched = set(self._active)
        for name in touched:
            active = self._active[name]
            for key in [key for key, a in active.items() if a.is_over(now)]:
                del active[key]
            self._tidy(name)
        return self._judge(touched, now)

    def _tidy(self, hardware: str) -> None:
        if not self._active[hardware]:
            del self._active[hardware]

    def _judge(self, hardware: Iterable[str], now: float) -> dict[str, Health]:
        changes = {}
        for name in hardware:
            before, after = self.of(name), self._merge(name, now)
            if (before.state, before.reason, before.message) == (after.state, after.reason, after.message):
                continue
            changes[name] = after
            if after is HEALTHY:
                del self._health[name]
            else:
                self._health[name] = after
        return changes

    def _merge(self, hardware: str, now: float) -> Health:
        """The worst that is said of it; of two equals the one that came first."""
        active = self._active.get(hardware, {}).values()
        for verdict in (Verdict.NOW, Verdict.DEGRADED):
            if counting := [a for a in active if a.verdict(now) is verdict]:
                first = min(counting, key=lambda a: (a.since, a.signal.reason, a.signal.message))
                since = now if self.of(hardware).state is not _STATES[verdict] else self.of(hardware).since
                return Health(_STATES[verdict], first.signal.reason, first.signal.message, since)
        return HEALTHY
