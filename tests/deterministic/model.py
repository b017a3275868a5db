"""What the kubelet must show: the hardware that is there and well, as far as the faults that last let anybody know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from agent.simulation.model import ResourceView

PATIENCE: Final = 2.0
"""Seconds in which the kubelet must show what there is, wherever an event tells of it."""

Units = Mapping[str, tuple[str, ...]]
"""Pieces of hardware → the IDs that each of them makes."""


@dataclass
class Model:
    """Hardware by resource; every fault says here what it changes, for as long as it lasts."""

    hardware: dict[str, Units]
    _out: Counter[tuple[str, str]] = field(default_factory=Counter)
    _unsure: Counter[tuple[str, str]] = field(default_factory=Counter)
    _before: Mapping[str, frozenset[str]] | None = None
    """What was healthy when nothing could be seen any more."""
    _steady: set[tuple[str, str]] = field(default_factory=set)
    """What has been well ever since."""
    _slow: list[float] = field(default_factory=list)
    blind: int = 0
    """How many faults last under which nothing can be said."""

    @contextmanager
    def without(self, resource: str, *units: str) -> Iterator[None]:
        """They are not healthy."""
        keys = [(resource, unit) for unit in units]
        self._out.update(keys)
        self._steady.difference_update(keys)
        try:
            yield
        finally:
            self._out.subtract(keys)

    @contextmanager
    def unsure(self, resource: str, *units: str) -> Iterator[None]:
        """They may be healthy or not."""
        keys = [(resource, unit) for unit in units or self.hardware[resource]]
        self._unsure.update(keys)
        try:
            yield
        finally:
            self._unsure.subtract(keys)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Nothing can be said."""
        self.blind += 1
        try:
            yield
        finally:
            self.blind -= 1

    @contextmanager
    def stale(self, seen: Mapping[str, ResourceView]) -> Iterator[None]:
        """What is healthy now stays so, whether or not what changes is seen."""
        self._before = {name: view.healthy for name, view in seen.items()}
        self._steady = {(resource, unit) for resource, units in self.hardware.items() for unit in units}
        try:
            yield
        finally:
            self._before = None

    @contextmanager
    def slower(self, seconds: float) -> Iterator[None]:
        """What changes may be seen so much later: nothing but a look now and then finds it."""
        self._slow.append(seconds)
        try:
            yield
        finally:
            self._slow.remove(seconds)

    def patience(self) -> float:
        """Seconds for the kubelet to show what is there."""
        return PATIENCE + sum(self._slow)

    def is_served(self, resource: str) -> bool:
        """By us."""
        return resource in self.hardware

    def differences(
        self, seen: Mapping[str, ResourceView], doubtful: Callable[[], Set[tuple[str, str]]] = set
    ) -> list[str]:
        """In what the kubelet's view differs from what is there, as sentences.

        `doubtful` tells, where it is asked, which IDs of resources may be healthy or not.
        """
        if self.blind:
            return []
        found = [
            (resource, what, ids)
            for resource in self.hardware
            for what, ids in self._of(resource, seen.get(resource, ResourceView(resource)))
            if ids
        ]
        known = doubtful() if found else set()
        sure = [(resource, what, {it for it in ids if (resource, it) not in known}) for resource, what, ids in found]
        return [f"{resource}: {what} {', '.join(sorted(ids))}" for resource, what, ids in sure if ids]

    def _of(self, resource: str, view: ResourceView) -> Iterator[tuple[str, frozenset[str]]]:
        healthy, sure, perhaps = view.healthy, set[str](), set[str]()
        for unit, ids in self.hardware[resource].items():
            key = resource, unit
            if self._unsure[key]:
                perhaps.update(ids)
            elif not self._out[key]:
                sure.update(ids)
        if self._before is not None:
            was = self._before.get(resource, frozenset())
            steady = {
                id_ for unit, ids in self.hardware[resource].items() if (resource, unit) in self._steady for id_ in ids
            }
            sure, perhaps = sure & was & steady, perhaps | sure | was
        yield "not healthy:", frozenset(sure - healthy)
        yield "healthy, and should not be:", frozenset(healthy - sure - perhaps)
