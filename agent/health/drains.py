"""Drains: an operator takes hardware out of service, for a reason, for a time or until further notice."""

from __future__ import annotations

import math
from typing import Final

from msgspec import Struct

from agent.health.formatting import clock
from agent.model import Health, State

LOOK_AGAIN: Final = 60.0
"""Seconds after which a drain's end is compared with the wall clock again: that clock may have been set."""


class Drain(Struct, frozen=True):
    """One piece of hardware that an operator has taken out of service."""

    hardware: str
    reason: str
    """The operator's words."""
    since: float
    """Seconds since the epoch; a drain outlives boots, and its end is a person's appointment."""
    until: float | None = None
    """Seconds since the epoch; None: until it is undrained."""

    def is_over(self, wall: float) -> bool:
        """Has its end come?"""
        return self.until is not None and self.until <= wall

    def deadline(self, now: float, wall: float) -> float | None:
        """When to look at the wall clock again, in monotonic seconds; later than now."""
        if self.until is None:
            return None
        return max(now + min(self.until - wall, LOOK_AGAIN), math.nextafter(now, math.inf))

    def told(self) -> str:
        """A sentence for an operator who drains it again."""
        until = f" until {clock(self.until)}" if self.until is not None else ""
        return f"drained since {clock(self.since)}{until}: {self.reason or 'no reason was given'}"

    def sentence(self, besides: Health) -> str:
        """What a person is told, who must also see what else is the matter."""
        why = f": {self.reason.rstrip('.')}" if self.reason else ""
        until = f", until {clock(self.until)}" if self.until is not None else ""
        if besides.state is State.HEALTHY:
            return f"an operator drained it{why}{until}"
        other = f"besides, it is {besides.state.value} with {besides.reason} ({besides.message.rstrip('.')})"
        return f"an operator drained it{why}{until}; {other}"
