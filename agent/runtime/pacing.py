"""Limits how often something is done: some times at once, then once in each period."""

from __future__ import annotations


class Credit:
    """`at_once` times at once; each period earns one more."""

    def __init__(self, at_once: int, period: float) -> None:
        """Begin with all of them; `period` is in seconds."""
        self._period = period
        self._lead = (at_once - 1) * period
        self._full = 0.0  # when all of them are there again

    def spend(self, now: float) -> float:
        """Spend one, at this monotonic time in seconds; returns the seconds until the next one, as `wait`."""
        self._full = max(self._full, now) + self._period
        return self._full - self._lead - now

    def wait(self, now: float) -> float:
        """The seconds until the next one may be spent: now, if not above 0."""
        return self._full - self._lead - now
