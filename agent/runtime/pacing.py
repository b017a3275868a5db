"""Paces what may come by the thousand: some at once, then one in each period."""

from __future__ import annotations


class Credit:
    """So many at once; each period earns one more."""

    def __init__(self, at_once: int, period: float) -> None:
        """Begin with all of it; `period` is in seconds."""
        self._period = period
        self._lead = (at_once - 1) * period
        self._full = 0.0  # when all of it is there again

    def spend(self, now: float) -> float:
        """One has come, at this monotonic time in seconds; how many of them until the next one may come, as `wait`."""
        self._full = max(self._full, now) + self._period
        return self._full - self._lead - now

    def wait(self, now: float) -> float:
        """Seconds until the next one may come; none is left to wait if that is not above 0."""
        return self._full - self._lead - now
