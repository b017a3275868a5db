"""Keeps the notices that are to become Events: few, merged where they say the same, and let out slowly.

A flapping device, or 10,000 that fail at once, must not flood the API server. Pure: `now` is monotonic seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from agent.kubernetes import notices
from agent.kubernetes.notices import Notice, Subject

BURST: Final = 25
"""Events that may go out at once (client-go's events_cache.go: defaultSpamBurst)."""

REFILL: Final = 5.0
"""Seconds for each one more: 720 of a node in an hour at most. client-go has 300 s, but for each object by itself."""

WAITING: Final = 100
"""Notices that wait; more are counted and told as one. The last of them goes out after 8 minutes."""

_Key = tuple[Subject, str, str]


def key_of(notice: Notice) -> _Key:
    """What notices have in common that are one Event."""
    return notice.subject, notice.reason, notice.device


class Waiting(Struct, frozen=True):
    """A notice that waits."""

    notice: Notice
    first: float
    """When it came first, in seconds since 1970."""
    last: float
    count: int = 1


class Bucket:
    """A token bucket: so many at once, then one for each span of time."""

    def __init__(self, burst: int = BURST, refill: float = REFILL) -> None:
        self._burst, self._refill = burst, refill
        self._tokens, self._filled = float(burst), 0.0

    def wait(self, now: float) -> float:
        """Seconds until there is a token; 0 if there is one."""
        self._tokens = min(float(self._burst), self._tokens + (now - self._filled) / self._refill)
        self._filled = now
        return max(0.0, (1.0 - self._tokens) * self._refill)

    def take(self) -> None:
        """Take one."""
        self._tokens -= 1.0


class EventQueue:
    """The notices that wait, the oldest first."""

    def __init__(self, node: Subject) -> None:
        """`node` is the subject of the notice that says how many were left out."""
        self._node = node
        self._waiting: OrderedDict[_Key, Waiting] = OrderedDict()
        self._omitted = 0
        self._omitted_at = 0.0

    def put(self, notice: Notice, wall: float) -> None:
        """Add a notice; `wall` is seconds since 1970."""
        key = key_of(notice)
        if (before := self._waiting.get(key)) is not None:
            self._waiting[key] = Waiting(notice, before.first, wall, before.count + 1)
            self._waiting.move_to_end(key)  # what is so now is told last
        elif len(self._waiting) < WAITING:
            self._waiting[key] = Waiting(notice, wall, wall)
        else:
            self._omitted, self._omitted_at = self._omitted + 1, wall

    def take(self) -> Waiting | None:
        """Take the next one out; after the last, one that says how many were left out."""
        if self._waiting:
            return self._waiting.popitem(last=False)[1]
        if not self._omitted:
            return None
        count, self._omitted = self._omitted, 0
        return Waiting(notices.omitted(self._node, count), self._omitted_at, self._omitted_at)

    def put_back(self, it: Waiting) -> None:
        """Put a notice that could not be sent at the front, with what came meanwhile."""
        key = key_of(it.notice)
        later = self._waiting.pop(key, None)
        if later is not None:
            it = Waiting(later.notice, it.first, later.last, it.count + later.count)
        self._waiting[key] = it
        self._waiting.move_to_end(key, last=False)
