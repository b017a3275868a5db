"""What each way of finding device nodes does: its part of the backend's interface, for its own groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from backends.base import All, Device, Discovery, Hint, Host, Signal, Watches
from backends.chardev import named_nodes
from backends.chardev.groups import Group
from backends.interface.known_devices import Known


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
