"""Formats times and numbers for sentences."""

from __future__ import annotations

from datetime import UTC, datetime


def span(seconds: float) -> str:
    """A duration, rounded up to what one says: `45 s`, `9 min`, `2 h`."""
    whole = max(1, -int(-seconds // 1))
    if whole < 120:
        return f"{whole} s"
    return f"{-(-whole // 60)} min" if whole < 7200 else f"{-(-whole // 3600)} h"


def clock(wall: float) -> str:
    """A moment, in UTC: a node's log and its operator may be in two time zones."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def times(number: int) -> str:
    """How often: `once`, `twice`, `5 times`."""
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
