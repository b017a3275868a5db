"""Evaluates statements about hardware: what each means at a time, and which of several is worst."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from agent.model import HEALTHY, Health, State
from backends.base import Clears, Signal, Verdict

_STATES: Final = {Verdict.NOW: State.UNHEALTHY, Verdict.DEGRADED: State.DEGRADED}


class Said(Protocol):
    """A signal, and what time makes of it."""

    @property
    def signal(self) -> Signal:
        """What was said."""

    @property
    def since(self) -> float:
        """Since when it is said."""

    @property
    def begins(self) -> float:
        """When it begins to count, or began."""

    @property
    def waits_for(self) -> frozenset[Clears]:
        """What ends it, where it is not a probe that no longer says so."""

    def verdict(self, now: float) -> Verdict:
        """What it means at this time; INFO if it does not count."""

    def deadline(self) -> float | None:
        """When time alone will change what it means; it may have passed."""


def matured(signal: Signal, since: float, now: float) -> Verdict:
    """What a signal means that is still there: a DELAYED one is NOW once it has lasted."""
    if signal.verdict is not Verdict.DELAYED:
        return signal.verdict
    return Verdict.NOW if since + signal.after <= now else Verdict.INFO


def counts(verdict: Verdict) -> bool:
    """Does it make hardware Unhealthy or Degraded?"""
    return verdict in _STATES


def worst(said: Iterable[Said], now: float) -> Health:
    """The worst that is said, without its date; of two equals the first, and rather one that counts while held too."""
    every = [(it.verdict(now), it) for it in said]
    for verdict, state in _STATES.items():
        if equals := [it for is_now, it in every if is_now is verdict]:
            first = min(equals, key=lambda it: (it.signal.unless_held, it.since, it.signal.reason, it.signal.message))
            return Health(state, first.signal.reason, first.signal.message)
    return HEALTHY
