"""The backend `chardev`: hands each group, unit and device to the way of finding it belongs to; gives nodes to the users that pods run as.

QEMU runs as a user, and the kernel's owner of a node is root. What a node was is noted before it is changed, one file for each
node in /run, which ends with the boot as the nodes do. A node plugged in again since is another one, and is not given
back.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import ClassVar, Final

import msgspec
from msgspec.structs import replace

from backends.base import (
    ALL,
    NUMBER,
    TEXT,
    All,
    AllocationRefused,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    Host,
    HostPath,
    Known,
    OptionsError,
    Released,
    Signal,
    Watches,
)
from backends.chardev import usb_sticks
from backends.chardev.bundles import Bundles
from backends.chardev.finder import NODE_ATTRIBUTES, Finder, Group, groups_of, numbers
from backends.chardev.nodes import Nodes
from backends.chardev.options import MOST_TOKENS, CharDevOptions, CharDevResource, GroupOptions, complaints
from backends.chardev.udev_matches import UdevMatches
from backends.chardev.usb_sticks import StickSets, UsbSticks, usb_env
from backends.errors import each, reason_of
from backends.interface.decoding import decoded
from backends.linux.kernel import Notes


def way_of_finding(options: GroupOptions) -> type[Finder]:
    """The finder that a group with these options belongs to."""
    if options.usb:
        return StickSets if options.together else UsbSticks
    if options.match:
        return UdevMatches
    first, *others = options.paths
    return Bundles if others or first.type == "mount" else Nodes


class CharDev(Backend[CharDevOptions]):
    """Hands out nodes of /dev."""

    options_type: ClassVar = CharDevOptions
    attributes: ClassVar = {
        **NODE_ATTRIBUTES,
        **usb_sticks.ATTRIBUTES,
        **dict.fromkeys(("id", "alias", "mount"), TEXT),
        "group": NUMBER,
    }

    def __init__(self, host: Host, resources: Sequence[CharDevResource]) -> None:
        super().__init__(host, resources)
        self._groups = {resource.configured: groups_of(resource) for resource in resources}
        by_way: dict[type[Finder], list[Group]] = defaultdict(list)
        for group in (group for resource in resources for group in groups_of(resource)):
            by_way[way_of_finding(group.options)].append(group)
        self._finders = tuple(way(host, groups) for way, groups in by_way.items())

    @classmethod
    def check(cls, resource: CharDevResource) -> None:
        """Refuse what no hardware could make right.

        Raises:
            OptionsError: with the offending key and a sentence.
            ExceptionGroup: of several of them.
        """
        OptionsError.raise_all(OptionsError(path, why) for path, why in complaints(resource))
        first: dict[str, int] = {}
        for group in groups_of(resource) if resource.spec.options.groups else ():
            for device_id in way_of_finding(group.options).fixed_ids(group):
                if len(first) > MOST_TOKENS:
                    return  # no list holds them, whatever they are
                if first.setdefault(device_id, group.number) != group.number:
                    raise OptionsError(
                        ("groups", group.number - 1),
                        f"would have a device with the ID {device_id}, as one before it would; keep one of them, or let "
                        "their first paths differ",
                    )

    @classmethod
    def tokens(cls, resource: CharDevResource) -> Iterable[tuple[tuple[str | int, ...], int]]:
        """The `count` of each group."""
        for group in groups_of(resource):
            yield ("groups", group.number - 1, "count") if group.number else ("count",), group.options.count

    @classmethod
    def fixed_ids(cls, resource: CharDevResource) -> Iterable[str]:
        """Those of all its groups."""
        return (
            device_id for group in groups_of(resource) for device_id in way_of_finding(group.options).fixed_ids(group)
        )

    def units(self) -> Iterable[str]:
        """Those of all finders; their prefixes keep them apart."""
        return [unit for finder in self._finders for unit in finder.units()]

    def discover(self, unit: str) -> Discovery:
        """Its finder's."""
        finder = self._finder_of(unit)
        return finder.discover(unit) if finder else Discovery()

    def probe(self, device: Device) -> Iterable[Signal]:
        """Its finder's; what cannot be used is read again instead."""
        finder = self._finder_of(device.unit)
        return finder.probe(device) if finder and not device.unusable else ()

    def _finder_of(self, unit: str) -> Finder | None:
        return next((finder for finder in self._finders if unit.startswith(finder.prefix)), None)

    def ids(self, resource: CharDevResource, device: Device) -> Sequence[str]:
        """Its finder's."""
        finder = self._finder_of(device.unit)
        return finder.ids(self._group(resource, device), device) if finder else ()

    def _group(self, resource: CharDevResource, device: Device) -> Group:
        """The group that a device of the resource is from."""
        groups = self._groups[resource.configured]
        return groups[int(device.attributes["group"][0]) - 1] if len(groups) > 1 else groups[0]

    def watches(self, known: Known) -> Watches:
        """What all finders listen to."""
        return reduce(or_, [finder.watches(known) for finder in self._finders])

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """The units that any finder looks at again."""
        affected: list[str] = []
        for finder in self._finders:
            units = finder.affects(hint, known)
            if units is ALL:
                return ALL
            affected += units
        return affected

    def needs_claim(self, resource: CharDevResource) -> bool:
        """True unless the config names every node: another device may have got the node since it was found."""
        return any(not group.options.paths for group in self._groups[resource.configured])

    def claim(self, resource: CharDevResource, grants: Sequence[Grant]) -> None:
        """Check that the nodes are still those that were found, and give them to the configured owner.

        Raises:
            AllocationRefused: they are not, and the event that tells of it is still to come or was lost; or they cannot
                be given.
        """
        for grant in grants:
            options = self._group(resource, grant.device).options
            if options.paths:
                continue
            found = self.discover(
                grant.device.unit
            ).devices  # the kernel links a stick's port some time after its event
            if grant.device not in (replace(device, place=grant.device.place) for device in found):
                raise AllocationRefused(
                    f"{grant.id} of {resource.name} was unplugged or plugged in again this moment. Create the pod again."
                )
            if options.owner is not None:
                nodes = zip(numbers(grant.device.attributes), (node.path for node in grant.device.nodes), strict=True)
                give(self.host, options.owner, nodes)

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:  # noqa: ARG002  # an interface's
        """Give nodes back to their owners; nodes that were not given away have no note.

        Raises:
            ExceptionGroup: of those that cannot be given back.
        """
        give_back(self.host, (name.removeprefix("node:") for name in sorted(idle) if name.startswith("node:")))

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
        if not any(group.options.usb for group in self._groups[resource.configured]):
            return edits
        sticks = [grant for grant in grants if self._group(resource, grant.device).options.usb]
        return replace(edits, env=usb_env(resource, sticks))


# --- owners of nodes ---


NOTES: Final = HostPath("/run/fairlead/owners")


class _Note(msgspec.Struct):
    path: str
    inode: int
    uid: int
    gid: int
    """As they were."""
    owner: int
    """Whom `give` gave it to: user and group."""
    earlier: list[int] = []
    """Whom `give` gave it to before: after a crash it may belong to one of these."""


def give(host: Host, owner: int, nodes: Iterable[tuple[str, HostPath]]) -> None:
    """Make the nodes, each with its number as `DeviceNode.number` writes it, belong to this user and its group.

    Raises:
        AllocationRefused: one cannot be given; what was given before is noted, for the release.
    """
    notes = Notes(host, NOTES)
    for number, path in nodes:
        node = host.local(path)
        try:
            status = node.lstat()
            if (status.st_uid, status.st_gid) == (owner, owner):
                continue
            note = _read(notes, number)
            if note is None or note.inode != status.st_ino:
                note = _Note(path.text, status.st_ino, status.st_uid, status.st_gid, owner)
            elif note.owner != owner:
                note.earlier, note.owner = [*note.earlier, note.owner], owner
            notes.write(number, msgspec.json.encode(note))
            os.chown(node, owner, owner, follow_symlinks=False)
        except OSError as error:
            raise AllocationRefused(
                f"{path} cannot be given to user {owner}: {reason_of(error)}. Ask this node's administrator to let "
                "Fairlead do so (it needs the capability CHOWN), or to leave out owner."
            ) from error


def give_back(host: Host, numbers: Iterable[str]) -> None:
    """Give nodes back to their owners, where `give` gave them away and no other program has changed them since.

    Raises:
        ExceptionGroup: of those that cannot be given back; their notes stay.
    """
    notes = Notes(host, NOTES)
    each(lambda number: _give_back(host, notes, number), numbers, OSError, "not given back")


def _give_back(host: Host, notes: Notes, number: str) -> None:
    if (note := _read(notes, number)) is None:
        return
    node = host.local(HostPath(note.path))
    with suppress(FileNotFoundError):  # it was unplugged
        status = node.lstat()
        ours = {(owner, owner) for owner in (note.owner, *note.earlier)}
        if status.st_ino == note.inode and (status.st_uid, status.st_gid) in ours:
            os.chown(node, note.uid, note.gid, follow_symlinks=False)
    notes.drop(number)


def _read(notes: Notes, number: str) -> _Note | None:
    """A node's note; None if there is none that can be read."""
    try:
        return None if (data := notes.read(number)) is None else decoded(data, _Note)
    except msgspec.MsgspecError:
        return None
