"""Merges what probes and records say into one health for each piece of hardware.

Pure: `now` is seconds on one monotonic clock, handed in. Signals of a probe are the whole truth about its hardware
at that moment and replace what the probe before said; signals of records latch until something in their
`clears_on` happens. Each method returns the hardware whose health changed, with its new health.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from agent.devices.model import HEALTHY, Health, State
from backends.base import Clears, Signal, Verdict


@dataclass(frozen=True, slots=True)
class _Active:
    """A signal that counts, since when, and since when it is no longer seen (hysteresis)."""

    signal: Signal
    since: float
    gone_since: float | None = None

    def verdict(self, now: float) -> Verdict:
        """What it means at this time: a DELAYED signal is NOW once it has lasted."""
        if self.signal.verdict is Verdict.DELAYED:
            return Verdict.NOW if now - self.since >= self.signal.after else Verdict.INFO
        return self.signal.verdict

    def deadline(self) -> float | None:
        """When time alone will change what it means."""
        if self.gone_since is not None:
            return self.gone_since + self.signal.recover_after
        return self.since + self.signal.after if self.signal.verdict is Verdict.DELAYED else None


_STATES = {Verdict.NOW: State.UNHEALTHY, Verdict.DEGRADED: State.DEGRADED}


class HealthBook:
    """The health of all hardware; the only one who decides it."""

    def __init__(self) -> None:
        self._probed: defaultdict[str, dict[str, _Active]] = defaultdict(dict)
        self._latched: defaultdict[str, dict[str, _Active]] = defaultdict(dict)
        self._health: dict[str, Health] = {}

    def of(self, hardware: str) -> Health:
        """The health of this hardware; what nobody complained of is healthy."""
        return self._health.get(hardware, HEALTHY)

    def probed(self, hardware: Iterable[str], signals: Iterable[Signal], now: float) -> dict[str, Health]:
        """A probe looked at `hardware` and saw `signals`, all there is to see."""
        asked = set(hardware)
        seen: defaultdict[str, dict[str, Signal]] = defaultdict(dict)
        for signal in signals:
            seen[signal.hardware][signal.reason] = signal
        for name in asked | seen.keys():
            if name in self._probed or name in seen:
                self._replace(name, seen.get(name, {}), now)
        return self._judge(asked | seen.keys(), now)

    def _replace(self, hardware: str, seen: dict[str, Signal], now: float) -> None:
        active = self._probed[hardware]
        for reason, old in list(active.items()):
            if reason in seen:
                continue
            if old.signal.recover_after > 0 and old.verdict(now) is Verdict.NOW:
                active[reason] = replace(old, gone_since=now if old.gone_since is None else old.gone_since)
            else:
                del active[reason]
        for reason, signal in seen.items():
            known = active.get(reason)
            active[reason] = _Active(signal, known.since if known else now)
        if not active:
            del self._probed[hardware]

    def recorded(self, signals: Iterable[Signal], now: float) -> dict[str, Health]:
        """A record said this: it holds until cleared."""
        touched = set()
        for signal in signals:
            self._latched[signal.hardware].setdefault(signal.reason, _Active(signal, now))
            touched.add(signal.hardware)
        return self._judge(touched, now)

    def cleared(self, by: Clears, hardware: Iterable[str], now: float) -> dict[str, Health]:
        """Something happened to this hardware that ends the latched signals that wait for it."""
        touched = set(hardware) & self._latched.keys()
        for name in touched:
            left = {r: a for r, a in self._latched[name].items() if by not in a.signal.clears_on}
            if left:
                self._latched[name] = left
            else:
                del self._latched[name]
        return self._judge(touched, now)

    def next_deadline(self, now: float) -> float | None:
        """When time alone will next change something; None if it will not."""
        deadlines = (active.deadline() for actives in self._probed.values() for active in actives.values())
        return min((deadline for deadline in deadlines if deadline is not None and deadline > now), default=None)

    def ripen(self, now: float) -> dict[str, Health]:
        """Time has passed: delayed signals that lasted count, recovered ones are forgotten."""
        touched = set(self._probed)
        for name in touched:
            left = {
                reason: active
                for reason, active in self._probed[name].items()
                if active.gone_since is None or now - active.gone_since < active.signal.recover_after
            }
            if left:
                self._probed[name] = left
            else:
                del self._probed[name]
        return self._judge(touched, now)

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
        active = [*self._latched.get(hardware, {}).values(), *self._probed.get(hardware, {}).values()]
        for verdict in (Verdict.NOW, Verdict.DEGRADED):
            if counting := [a for a in active if a.verdict(now) is verdict]:
                first = min(counting, key=lambda a: (a.since, a.signal.reason))
                since = now if self.of(hardware).state is not _STATES[verdict] else self.of(hardware).since
                return Health(_STATES[verdict], first.signal.reason, first.signal.message, since)
        return HEALTHY
