"""What a plugin did in one scenario, in its order; checks judge it and nothing else.

A timeline has what the kubelet saw (`Change`), what the plugin asked it (`Asked`), what the plugin answered (`Called`), what the
suite did (`Did`), what the process took (`Used`) and how it ended (`Ended`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from msgspec import Struct

from agent.kubelet.api.v1beta1 import (
    ContainerAllocateResponse,
    Device,
    ListAndWatchResponse,
)
from agent.simulation.model import Change, Kind

_NAMED: Final = 3
"""Devices that one sentence names."""


class Asked(Struct, frozen=True):
    """A Register as it came."""

    at: float
    resource: str
    version: str
    endpoint: str
    deadline: float | None
    """Seconds that the plugin waits for the answer at most."""
    options: tuple[str, ...]
    """The names of the options that the request sets."""
    unreachable: str = ""
    """Why the endpoint could not be connected to at that moment, if so."""


class Called(Struct, frozen=True):
    """One call of the plugin, which ended at `at`."""

    at: float
    label: str
    """Which call of its scenario."""
    seconds: float
    resource: str = ""
    ids: tuple[str, ...] = ()
    """The devices that were asked for, or that could be chosen from."""
    must: tuple[str, ...] = ()
    size: int = 0
    error: str = ""
    containers: tuple[bytes, ...] = ()
    """Of Allocate: each container's part."""
    chosen: tuple[str, ...] = ()
    """Of GetPreferredAllocation; of GetDevicePluginOptions, the names of those set."""

    @property
    def replies(self) -> list[ContainerAllocateResponse]:
        """Of Allocate: what each container gets."""
        return [ContainerAllocateResponse.FromString(data) for data in self.containers]


class Did(Struct, frozen=True):
    """The suite did something."""

    at: float
    what: str
    text: str = ""


class Used(Struct, frozen=True):
    """What the process had used by then."""

    at: float
    label: str
    cpu: float
    """Seconds of a processor since its start."""
    memory: int
    """Resident bytes."""
    files: int
    """Open descriptors."""


class Ended(Struct, frozen=True):
    """The plugin's process ended."""

    at: float
    code: int
    asked: bool
    """Whether the suite had told it to."""
    words: str = ""
    """What it printed last."""


Event = Asked | Called | Did | Used | Ended | Change
_Of = TypeVar("_Of", Asked, Called, Did, Used, Ended, Change)


class NotApplicable(Exception):  # noqa: N818  # no error: what a check says of a plugin that has no such feature
    """The plugin has no such feature, or this kubelet does otherwise; the sentence says which."""


class Skipped(Exception):  # noqa: N818  # as above
    """The check could not be made; the sentence says what it takes, or ends with `: see CHECK`, the failed one that it follows from."""


class Timeline(Struct, frozen=True):
    """The events of one scenario, oldest first."""

    events: tuple[Event, ...]
    subject: str = ""
    """The resource whose devices were asked for."""

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def of(self, kind: type[_Of]) -> list[_Of]:
        """The events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def did(self, what: str) -> list[Did]:
        """When the suite did this."""
        return [it for it in self.of(Did) if it.what == what]

    def since(self, what: str) -> Timeline:
        """What came after the suite last did this.

        Raises:
            Skipped: it never did.
        """
        numbers = [n for n, it in enumerate(self.events) if isinstance(it, Did) and it.what == what]
        if not numbers:
            raise Skipped(f"the scenario did not come to it: {what}")
        return Timeline(self.events[numbers[-1] + 1 :], self.subject)

    def until(self, what: str) -> Timeline:
        """What came before the suite first did this."""
        numbers = (n for n, it in enumerate(self.events) if isinstance(it, Did) and it.what == what)
        return Timeline(self.events[: next(numbers, len(self.events))], self.subject)

    def changes(self, *kinds: Kind, resource: str = "") -> list[Change]:
        """What the kubelet saw, of these kinds."""
        return [it for it in self.of(Change) if it.kind in kinds and resource in ("", it.resource)]

    @property
    def resources(self) -> list[str]:
        """Every resource that the plugin asked the kubelet for, or that a list came for."""
        names = [it.resource for it in self.of(Asked)]
        names += [it.resource for it in self.changes(Kind.LIST)]
        return sorted(set(names))

    def registered(self, resource: str) -> Change | None:
        """The first Register that the kubelet accepted and whose list it has."""
        return next(iter(self.changes(Kind.REGISTERED, resource=resource)), None)

    def lists(self, resource: str = "") -> list[tuple[str, list[Device]]]:
        """Every list that came: its resource and its devices."""
        return [
            (it.resource, ListAndWatchResponse.FromString(it.message).devices)
            for it in self.changes(Kind.LIST, resource=resource)
        ]

    def health(self, resource: str = "") -> list[dict[str, str]]:
        """Every list of a resource, by default of the subject: ID → health."""
        return [{device.id: device.health for device in devices} for _, devices in self.lists(resource or self.subject)]

    def call(self, label: str) -> Called:
        """The last call of this label.

        Raises:
            Skipped: there was none.
        """
        found = [it for it in self.of(Called) if it.label == label]
        if not found:
            raise Skipped(f"the scenario did not come to it: {label}")
        return found[-1]

    def calls(self, label: str) -> list[Called]:
        """Every call whose label starts so."""
        return [it for it in self.of(Called) if it.label.startswith(label)]

    def allocatable(self, resource: str = "") -> int:
        """How many of its devices the node could give at the end."""
        views = [
            it.after for it in self.of(Change) if it.after is not None and it.resource == (resource or self.subject)
        ]
        return views[-1].allocatable if views else 0

    def used(self, label: str) -> Used:
        """What the process had used then.

        Raises:
            Skipped: that could not be read.
        """
        found = [it for it in self.of(Used) if it.label == label]
        if not found:
            raise Skipped("what the process uses could not be read in /proc")
        return found[-1]

    def ended(self) -> str:
        """A sentence about a process that ended though nothing had told it to; nothing if none did."""
        found = [it for it in self.of(Ended) if not it.asked]
        words = f"; its last words: {found[-1].words}" if found and found[-1].words else ""
        return f"its process ended by itself with code {found[-1].code}{words}" if found else ""


Judge = Callable[[Timeline], str]
"""Why the plugin fails, as a sentence; nothing if it passes. Raises NotApplicable or Skipped."""


def first(sentences: Iterable[str]) -> str:
    """The first sentence there is."""
    return next((sentence for sentence in sentences if sentence), "")


def named(ids: Iterable[str]) -> str:
    """A few devices by name."""
    every = sorted(ids)
    more = f" and {len(every) - _NAMED} more" if len(every) > _NAMED else ""
    return ", ".join(repr(one) for one in every[:_NAMED]) + more
