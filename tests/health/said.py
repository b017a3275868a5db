"""Signals and records, and a book that is told of them, each in one line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from agent.health import HealthBook
from agent.model import Health
from backends.base import Clears, Device, Measure, Record, Signal, Trend, Verdict
from tests.fakes import device

NOW, DELAYED, DEGRADED, INFO, FINE = Verdict.NOW, Verdict.DELAYED, Verdict.DEGRADED, Verdict.INFO, Verdict.FINE
RISES, BELOW_BEST = Trend.RISES, Trend.BELOW_BEST
BOOT: Final = "boot 1"


def signal(
    verdict: Verdict = NOW,
    reason: str = "sick",
    hardware: str = "h",
    *,
    after: float = 0.0,
    recover_after: float = 0.0,
    clears_on: Iterable[Clears] = (),
    unless_held: bool = False,
    message: str = "",
) -> Signal:
    words = message or f"It is {reason}."
    on = frozenset(clears_on)
    return Signal(hardware, reason, verdict, words, after, recover_after, on, unless_held=unless_held)


def number(
    value: int,
    trend: Trend = RISES,
    verdict: Verdict = DEGRADED,
    *,
    name: str = "errors",
    hardware: str = "h",
    recover_after: float = 0.0,
) -> Signal:
    said = signal(verdict, f"{name}-{trend.value}", hardware, recover_after=recover_after)
    return replace(said, measure=Measure(name, value, trend))


def record(sequence: int = 1, *, boot: str = BOOT, source: str = "kmsg") -> Record:
    return Record(source, boot, sequence, 0.0, "a line")


def probe(book: HealthBook, now: float, *signals: Signal, unit: str = "u") -> dict[str, Health]:
    return book.probed("fake", {unit: signals}, now)


def latch(book: HealthBook, now: float, *signals: Signal, sequence: int = 1) -> dict[str, Health]:
    return book.recorded(signals, record(sequence), now)


def find(book: HealthBook, now: float, binding: str, hardware: str = "h", backend: str = "fake") -> dict[str, Health]:
    """Discovery sees the hardware so; the unit has its name."""
    return book.found(backend, {hardware: [bound(binding, hardware)]}, now)


def bound(binding: str, hardware: str = "h") -> Device:
    return replace(device(hardware), bindings={hardware: binding} if binding else {})


def flap(book: HealthBook, times: int, began: float = 0.0, every: float = 2.0, *, cause: Signal | None = None) -> float:
    """Fail and recover so often; the time of the last recovery, half a period after the last failure."""
    for number_of in range(times):
        probe(book, began + number_of * every, cause or signal(), unit="flapping")
        probe(book, began + (number_of + 0.5) * every, unit="flapping")
    return began + (times - 0.5) * every


def states(changes: dict[str, Health]) -> dict[str, str]:
    return {hardware: health.reason or health.state.value for hardware, health in changes.items()}
