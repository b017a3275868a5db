"""Merges all that is known of a piece of hardware into one health and a list of statements for a person.

The worst that is said counts. A drain comes first, since a person decided it, and its sentence says what else is the
matter; then quarantine, since what is said of flapping hardware is true for moments only.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from agent.health.causes import Latch, Said, counts, worst
from agent.health.drains import Drain, Quarantine
from agent.model import HEALTHY, Health, State
from backends.base import Clears, Verdict

DRAINED = "drained"
FLAPPING = "flapping"


class Statement(Struct, frozen=True):
    """One thing that is said of a piece of hardware, for a person: who says it, and what will end it."""

    source: str
    """`probe`, `record`, `operator` (a drain) or `quarantine`."""
    verdict: Verdict
    reason: str
    message: str
    since: float
    """Seconds on the agent's monotonic clock."""
    counts: bool
    """Does it make the hardware Unhealthy or Degraded now?"""
    changes: float | None = None
    """When time alone will change what it means, on the same clock; None if it will not."""
    waits_for: frozenset[Clears] = frozenset()
    """Any of these ends it. What a probe says ends when the probe no longer says it."""
    unless_held: bool = False
    """It does not count while a pod holds the hardware."""


class Causes(Struct, frozen=True):
    """All that makes the health of one piece of hardware."""

    said: tuple[Said, ...]
    drain: Drain | None
    quarantine: Quarantine | None
    """One that lasts."""

    def own(self, now: float) -> Health:
        """The worst of what probes and records say."""
        return worst(self.said, now)

    def while_held(self, now: float) -> Health:
        """The worst of it that counts while a pod holds the hardware."""
        return worst((it for it in self.said if not it.signal.unless_held), now)


def compose(causes: Causes, before: Health, now: float, offset: float) -> Health:
    """The health that these causes make; it is dated from when the hardware came to be in its state, or was drained.

    `offset` is from monotonic to wall clock seconds.
    """
    drains = causes.drain is not None or before.reason == DRAINED
    ours = counts_since(causes, now, offset) if drains else None
    health = _dated(_overruled(causes, causes.own(now)), before, now, ours)
    if not any(it.signal.unless_held for it in causes.said):
        return health
    held = _dated(_overruled(causes, causes.while_held(now)), before.to_holder, now, ours)
    return health if health.says_what(held) else replace(health, while_held=held)


def _overruled(causes: Causes, own: Health) -> Health:
    """What an operator, and then quarantine, make of what is said."""
    if causes.quarantine is not None:
        own = Health(State.UNHEALTHY, FLAPPING, causes.quarantine.message)
    if causes.drain is not None:
        own = Health(State.UNHEALTHY, DRAINED, causes.drain.sentence(besides=own))
    return own


def _dated(health: Health, before: Health, now: float, otherwise: float | None) -> Health:
    """With its date: from before, where only the reason is another and no drain begins, lasts or ends."""
    if health is HEALTHY:
        return health
    if otherwise is not None:
        return replace(health, since=min(otherwise, now))
    return replace(health, since=before.since if before.state is health.state else now)


def statements(causes: Causes, now: float, offset: float) -> tuple[Statement, ...]:
    """Everything that is said, what overrules the rest first; `offset` is from monotonic to wall clock seconds."""
    return (*_overruling(causes, offset), *(_statement(it, now) for it in sorted(causes.said, key=lambda it: it.since)))


def counts_since(causes: Causes, now: float, offset: float) -> float:
    """Since when a drain lasts, else the first of what counts does, on the monotonic clock; `offset` as above."""
    if causes.drain is not None:
        return causes.drain.since - offset
    said = (it.begins for it in causes.said if counts(it.verdict(now)))
    return min((*said, *(it.since for it in _overruling(causes, offset))), default=now)


def _overruling(causes: Causes, offset: float) -> Iterator[Statement]:
    operator = frozenset({Clears.OPERATOR})
    if (drain := causes.drain) is not None:
        until = None if drain.until is None else drain.until - offset
        words = drain.sentence(besides=HEALTHY)
        yield Statement("operator", Verdict.NOW, DRAINED, words, drain.since - offset, True, until, operator)
    if (it := causes.quarantine) is not None:
        yield Statement("quarantine", Verdict.NOW, FLAPPING, it.message, it.since, True, it.until, operator)


def _statement(it: Said, now: float) -> Statement:
    signal, deadline = it.signal, it.deadline()
    return Statement(
        source="record" if isinstance(it, Latch) else "probe",
        verdict=signal.verdict,
        reason=signal.reason,
        message=signal.message,
        since=it.since,
        counts=counts(it.verdict(now)),
        changes=deadline if deadline is not None and deadline > now else None,
        waits_for=it.waits_for,
        unless_held=signal.unless_held,
    )
