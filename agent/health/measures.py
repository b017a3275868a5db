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
        self._memory: dict[Source, dict[_Key, int]] = {}

    @property
    def sources(self) -> Set[Source]:
        """The units of which any number is known."""
        return self._memory.keys()

    def counts(self, source: Source, hardware: str, measure: Measure) -> bool:
        """Does the number do what its trend says? The first sight of it is a baseline and says nothing.

        A counter that falls was reset, or wrapped: a new baseline. One that is saturated stands still.
        """
        memory = self._memory.setdefault(source, {})
        key = (hardware, measure.name, measure.trend)
        before = memory.get(key, measure.value)
        if measure.trend is Trend.RISES:
            memory[key] = measure.value
            return measure.value > before
        memory[key] = max(measure.value, before)
        return measure.value < before

    def keep(self, source: Source, hardware: Set[str]) -> None:
        """Only this hardware is left in the unit."""
        if source in self._memory:
            left = {key: value for key, value in self._memory[source].items() if key[0] in hardware}
            if left:
                self._memory[source] = left
            else:
                del self._memory[source]

    def forget(self, hardware: Iterable[str]) -> None:
        """Forget this hardware's numbers: another driver counts, or an operator said that all is well."""
        names = set(hardware)
        for source in list(self._memory):
            self.keep(source, {key[0] for key in self._memory[source]} - names)
