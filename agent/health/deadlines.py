"""Keeps one deadline for each name, and finds the earliest of all in no time."""

from __future__ import annotations

import heapq


class Deadlines:
    """A heap whose entries are outdated by newer ones, and thrown out when they come up."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, name: str, due: float | None) -> None:
        """The name's deadline is this from now on; None: it has none."""
        if due is None:
            self._due.pop(name, None)
        elif self._due.get(name) != due:
            self._due[name] = due
            heapq.heappush(self._heap, (due, name))
            if len(self._heap) > 2 * len(self._due) + 64:  # most are outdated
                self._heap = sorted((due, name) for name, due in self._due.items())

    def next(self) -> float | None:
        """The first deadline; None if there is none."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float, most: int | None = None) -> list[str]:
        """The names whose deadlines have come, the earliest first, and so many at most; they have none any more."""
        names: list[str] = []
        while (due := self.next()) is not None and due <= now and len(names) != most:
            name = heapq.heappop(self._heap)[1]
            del self._due[name]
            names.append(name)
        return names
