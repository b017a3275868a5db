"""The backend: hands each resource, unit and device to the finder it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import ClassVar

from backends.base import (
    ALL,
    All,
    AllocationRefused,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    Host,
    Signal,
    Watches,
)
from backends.chardev.bundles import Bundles
from backends.chardev.finder import Finder
from backends.chardev.matches import UdevMatches
from backends.chardev.nodes import Nodes
from backends.chardev.options import CharDevOptions, CharDevResource, check
from backends.chardev.usb import UsbSticks, usb_env
from backends.known import Known
from backends.linux.globs import is_glob


def way_of_finding(options: CharDevOptions) -> type[Finder]:
    """The finder that a resource with these options belongs to."""
    if options.usb:
        return UsbSticks
    if options.match:
        return UdevMatches
    first, *others = options.paths
    return Bundles if others or first.type == "mount" or (first.limit > 1 and is_glob(first.path)) else Nodes


class CharDev(Backend[CharDevOptions]):
    """Hands out nodes of /dev."""

    options_type: ClassVar = CharDevOptions

    def __init__(self, host: Host, resources: Sequence[CharDevResource]) -> None:
        super().__init__(host, resources)
        ways = {resource.name: way_of_finding(resource.spec.options) for resource in resources}
        self._finders: dict[type[Finder], Finder] = {
            way: way(host, [resource for resource in resources if ways[resource.name] is way])
            for way in dict.fromkeys(ways.values())
        }
        self._all = tuple(self._finders.values())

    @classmethod
    def check(cls, resource: CharDevResource) -> None:
        """Refuse what no hardware could make right.

        Raises:
            OptionsError: with the offending key and a sentence.
        """
        check(resource)

    @classmethod
    def fixed_ids(cls, resource: CharDevResource) -> Iterable[str]:
        """Its finder's."""
        return way_of_finding(resource.spec.options).fixed_ids(resource)

    def units(self) -> Iterable[str]:
        """Those of all finders; their prefixes keep them apart."""
        return [unit for finder in self._all for unit in finder.units()]

    def discover(self, unit: str) -> Discovery:
        """Its finder's."""
        finder = self._finder_of(unit)
        return finder.discover(unit) if finder else Discovery()

    def probe(self, device: Device) -> Iterable[Signal]:
        """Its finder's."""
        finder = self._finder_of(device.unit)
        return finder.probe(device) if finder else ()

    def _finder_of(self, unit: str) -> Finder | None:
        return next((finder for finder in self._all if unit.startswith(finder.prefix)), None)

    def ids(self, resource: CharDevResource, device: Device) -> Sequence[str]:
        """Its finder's."""
        return self._finders[way_of_finding(resource.spec.options)].ids(resource, device)

    def watches(self, known: Known) -> Watches:
        """What all finders want to hear of."""
        return reduce(or_, (finder.watches(known) for finder in self._all), Watches())

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """What any finder wants to look at again."""
        affected: list[str] = []
        for finder in self._all:
            units = finder.affects(hint, known)
            if units is ALL:
                return ALL
            affected += units
        return affected

    def needs_claim(self, resource: CharDevResource) -> bool:
        """Only where a node may have become another's since it was found: not where the config names it."""
        return not resource.spec.options.paths

    def claim(self, resource: CharDevResource, grants: Sequence[Grant]) -> None:
        """Look once more whether the nodes are still those that were found.

        Raises:
            AllocationRefused: they are not; the event that tells of it is under way, or was lost.
        """
        for grant in grants:
            if grant.device not in self.discover(grant.device.unit).devices:
                raise AllocationRefused(
                    f"{grant.id} of {resource.name} was unplugged or plugged in again this moment. Create the pod again."
                )

    def edits(self, resource: CharDevResource, grants: Sequence[Grant]) -> ContainerEdits:
        """Each node and mount once, however many of its tokens were granted.

        Raises:
            AllocationRefused: two of them would lie at the same path in the container.
        """
        edits = ContainerEdits.of(grants)
        taken: set[str] = set()
        for path in (*(node.container_path for node in edits.nodes), *(mount.container_path for mount in edits.mounts)):
            if path in taken:
                raise AllocationRefused(
                    f"{resource.name} puts each device at {path}: a container can have only one of them"
                )
            taken.add(path)
        env = usb_env(resource, grants) if resource.spec.options.usb else {}
        return replace(edits, env=env)
