"""What each way of finding device nodes does: its part of the backend's interface, for its own groups of a resource."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from msgspec import Struct

from backends.base import All, Device, Discovery, Hint, Host, Signal, Watches
from backends.chardev import named_nodes
from backends.chardev.options import CharDevResource, GroupOptions
from backends.interface.values import Known

# --- groups of a resource ---


class Group(Struct, frozen=True, eq=False):
    """One group; a resource without `groups` is one."""

    resource: str
    options: GroupOptions
    number: int = 0
    """From 1, as the config lists them; 0 of a resource without `groups`."""
    attributes: Mapping[str, tuple[str, ...]] = {}
    """What each of its devices has."""

    @property
    def name(self) -> str:
        """Its name among the groups of all resources."""
        return f"{self.resource}#{self.number}" if self.number else self.resource


def groups_of(resource: CharDevResource) -> tuple[Group, ...]:
    """A resource's groups in their order."""
    options = resource.spec.options
    if not options.groups:
        return (Group(resource.name, options),)
    return tuple(
        Group(resource.name, group, number, {"group": (str(number),)}) for number, group in enumerate(options.groups, 1)
    )


class Finder(ABC):
    """One way of finding devices. `backends.base.Backend` says what each method is for.

    A group belongs to one finder; a resource has as many as its groups have ways. `known` holds the units of all
    finders: those of this one start with `prefix`. What several of its groups of one resource take is the first one's;
    of what those of two finders take, the inventory offers one and tells the reason of the other.
    """

    prefix: ClassVar[str]

    @abstractmethod
    def __init__(self, host: Host, groups: Sequence[Group]) -> None:
        self.host = host

    @staticmethod
    def fixed_ids(group: Group) -> Iterable[str]:  # noqa: ARG004  # a default
        """As `Backend.fixed_ids`; by default none, since devices come and go."""
        return ()

    @abstractmethod
    def units(self) -> Iterable[str]:
        """As `Backend.units`."""

    @abstractmethod
    def discover(self, unit: str) -> Discovery:
        """As `Backend.discover`."""

    @abstractmethod
    def watches(self, known: Known) -> Watches:
        """As `Backend.watches`."""

    @abstractmethod
    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """As `Backend.affects`."""

    def probe(self, device: Device) -> Iterable[Signal]:
        """As `Backend.probe`; by default: are its nodes there, and still the same?"""
        return named_nodes.signals(self.host, device)

    @abstractmethod
    def ids(self, group: Group, device: Device) -> Sequence[str]:
        """As `Backend.ids`."""
