"""What each way of finding device nodes does: its part of the backend's interface, for its own resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol

from backends.base import All, Device, Discovery, Hint, Host, Signal, Watches
from backends.chardev.options import CharDevResource
from backends.known import Known


class Finder(Protocol):
    """One way of finding devices. `backends.base.Backend` says what each method is for.

    A resource belongs to one finder. `known` holds the units of all of them: those of this one start with `prefix`.
    """

    prefix: ClassVar[str]

    def __init__(self, host: Host, resources: Sequence[CharDevResource]) -> None: ...

    @staticmethod
    def fixed_ids(resource: CharDevResource) -> Iterable[str]:
        """As `Backend.fixed_ids`."""

    def units(self) -> Iterable[str]:
        """As `Backend.units`."""

    def discover(self, unit: str) -> Discovery:
        """As `Backend.discover`."""

    def watches(self, known: Known) -> Watches:
        """As `Backend.watches`."""

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """As `Backend.affects`."""

    def probe(self, device: Device) -> Iterable[Signal]:
        """As `Backend.probe`."""

    def ids(self, resource: CharDevResource, device: Device) -> Sequence[str]:
        """As `Backend.ids`."""
