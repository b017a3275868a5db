"""The groups of a resource, each of which finds devices in its own way."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from backends.chardev.options import CharDevResource, GroupOptions


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
