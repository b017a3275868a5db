"""The names that the agent and the baseline offer alike, so that their lists are the same."""

from __future__ import annotations


def resource_names(count: int) -> list[str]:
    return [f"bench.example/r{n}" for n in range(count)]


def device_names(count: int) -> list[str]:
    """As the kubelet sees them; a list has them in this order at first."""
    return [f"bench{n}" for n in range(count)]
