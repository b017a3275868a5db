"""Derives a device's health from that of its hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from msgspec.structs import replace

from agent.model import HEALTHY, Health, State
from backends.base import Device


def condition(device: Device, health_of: Callable[[str], Health]) -> Health:
    """The worst of its own hardware and of what it depends on.

    One that can do with some of it is unhealthy once all its parts are, and degraded while some are.
    """
    if not device.parts:
        return _worst(device.hardware | device.depends, health_of)
    depends = _worst(device.depends.difference(*device.parts), health_of)
    if depends.state is State.UNHEALTHY:
        return depends
    parts = [_worst(part, health_of) for part in device.parts]
    bad = [health for health in parts if health.state is State.UNHEALTHY]
    if bad and len(bad) < len(parts):
        return _degraded(bad[0])
    return next((health for health in (*bad, depends, *parts) if health is not HEALTHY), HEALTHY)


def _worst(hardware: Iterable[str], health_of: Callable[[str], Health]) -> Health:
    """Of several that are equally bad, that of the first name."""
    states = {(health := health_of(name)).state: health for name in sorted(hardware, reverse=True)}
    return states.get(State.UNHEALTHY) or states.get(State.DEGRADED) or HEALTHY


@lru_cache(maxsize=256)  # the same object for the same health: lists tell by that what has changed
def _degraded(health: Health) -> Health:
    return replace(health, state=State.DEGRADED, while_held=None)
