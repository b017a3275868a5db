"""Remembers what the container that a kubelet admits has been given so far, for the choice among its other resources.

A kubelet asks for one resource of one container at a time and names neither pod nor container. But it admits one
container after the other, asks for each of its resources once, in any order, without doing anything else in between, and
writes its checkpoint when it has all of them (`ManagerImpl.allocateContainerResources`). So what is asked for goes with
what was given just before, unless its resource was among that, or the checkpoint was written since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from backends.base import Device

LONGEST: Final = 1.0
"""Seconds between an answer and the kubelet's next question about the same container, which takes it some ms.

A container that it gives up between two resources ends without a checkpoint: the time ends it.
"""

Given = Mapping[str, Sequence[Device]]
"""What a container has, by resource."""


class Admission:
    """The container under way."""

    def __init__(
        self, written: Callable[[], object | None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`written` tells one writing of the kubelet's checkpoint from another; None: each question stands alone."""
        self._written = written
        self._clock = clock
        self._given: Given = {}
        self._version: object | None = None
        self._at = 0.0

    def so_far(self, resource: str) -> Given:
        """What the container that asks for this resource has of others; nothing where it may be another container."""
        given = self._given
        if not given or resource in given or self._version is None or self._clock() - self._at > LONGEST:
            return {}
        return given if self._written() == self._version else {}

    def take(self, resource: str) -> Given:
        """The same, and forget it: it is over unless the container gets what it asks for, and `given` is told."""
        found, self._given = self.so_far(resource), {}
        return found

    def given(self, devices: Given) -> None:
        """The container under way has all this by now."""
        self._given, self._version, self._at = devices, self._written(), self._clock()
