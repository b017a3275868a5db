"""Remembers the last numbers of `Signal.measure` for probes, which have no memory to compare with."""

from __future__ import annotations

from collections.abc import Iterable, Set

from backends.base import Measure, Trend

_Key = tuple[str, str, Trend]
"""Hardware, the number's name, what it is watched for."""

Source = tuple[str, str]
"""Backend and unit."""


class Measures:
    """Every number as it was last seen, or its best; forgotten with the unit it was read in."""

    def __init__(self) -> None:
        self.numbers: dict[Source, dict[_Key, int]] = {}
        """By the units they were read in."""

    def counts(self, source: Source, hardware: str, measure: Measure) -> bool:
        """Does the number do what its trend says? The first sight of it is a baseline and says nothing.

        A counter that falls was reset, or wrapped: a new baseline. One that is saturated stands still.
        """
        memory = self.numbers.setdefault(source, {})
        key = (hardware, measure.name, measure.trend)
        before = memory.get(key, measure.value)
        if measure.trend is Trend.RISES:
            memory[key] = measure.value
            return measure.value > before
        memory[key] = max(measure.value, before)
        return measure.value < before

    def keep(self, source: Source, hardware: Set[str]) -> None:
        """Only this hardware is left in the unit, of which some number is known."""
        self.numbers[source] = {key: value for key, value in self.numbers[source].items() if key[0] in hardware}
        if not self.numbers[source]:
            del self.numbers[source]

    def forget(self, hardware: Iterable[str]) -> None:
        """Forget this hardware's numbers: another driver counts, or an operator said that all is well."""
        names = set(hardware)
        for source in list(self.numbers):
            self.keep(source, {key[0] for key in self.numbers[source]} - names)
