"""Finds devices by what the kernel and udev say of them: each that has a node and matches is a device.

A unit is a device number, `udev:c:188:0`, because that is what events and udev's database both name; or a subsystem,
`udev:tty`, for what is to be said of all of it. The ID is udev's lasting link to the node, by ID or else by path
(`serial/by-id/usb-…`). A link that several devices claim is none of theirs: the two cameras of a notebook have one by ID,
the three codecs of a Raspberry Pi one by path, and which of them udev makes it lead to is chance. Without a link of its own
a device has the node's own name below /dev, which follows the order of plugging in.
Where udev keeps a database, a device is offered once it is in there: before that its ID would be another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import ClassVar, Final

from backends.base import Device, Discovery, Hint, Host, Known, PathChange, Problem, Uevent, Watches
from backends.chardev.finder import (
    Finder,
    Group,
    container_nodes,
    default_permissions,
    member,
    node_attributes,
    node_hardware,
    tokens,
)
from backends.chardev.options import MatchOption, listed
from backends.errors import reason_of
from backends.linux import sysfs, udev
from backends.linux.nodes import NoNodeError, behind
from backends.linux.udev import UdevDevice

_LASTING: Final = ("/by-id/", "/by-path/")  # in the names of udev's links, the better first


class UdevMatches(Finder):
    """Finds the devices that groups match."""

    prefix: ClassVar = "udev:"

    def __init__(self, host: Host, groups: Sequence[Group]) -> None:
        super().__init__(host, groups)
        self._wanted: dict[str, list[tuple[Group, MatchOption]]] = defaultdict(list)
        for group in groups:
            for _, option in listed("match", group.options.match):
                self._wanted[option.subsystem].append((group, option))

    def units(self) -> Iterable[str]:
        """Every device with a node in the subsystems, and each subsystem."""
        subsystems = list(self._wanted)
        numbers = (number for subsystem in subsystems for number in self._numbers(subsystem) or ())
        return [f"{self.prefix}{what}" for what in (*subsystems, *numbers)]

    def _numbers(self, subsystem: str) -> list[str] | None:
        try:
            return udev.numbers(self.host, subsystem)
        except OSError:
            return None

    def discover(self, unit: str) -> Discovery:
        """One device for each resource with a match that fits."""
        what = unit.removeprefix(self.prefix)
        if ":" not in what:
            return Discovery(problems=tuple(Problem(unit, why) for why in self._complaints(what)))
        found = udev.read(self.host, what)
        if found is None or (not found.recorded and udev.has_database(self.host)):
            return Discovery()
        devices, problems = [], []
        for group in self._takers(found):
            try:
                devices.append(self._device(unit, found, group))
            except NoNodeError as error:
                why = f"{found.path} is not offered by {group.resource}: {error}"
                problems.append(Problem(unit, why, group.resource))
        return Discovery(tuple(devices), problems=tuple(problems))

    def _takers(self, found: UdevDevice) -> Iterable[Group]:
        """Of each resource the first group with a match that fits."""
        first: dict[str, Group] = {}
        for group, option in self._wanted.get(found.node.subsystem, ()):
            if group.resource not in first and _fits_kernel(self.host, option, found) and _fits_udev(option, found):
                first[group.resource] = group
        return first.values()

    def _device(self, unit: str, found: UdevDevice, group: Group) -> Device:
        node = [member(self.host, found.node)]
        stands_for = behind(self.host, node[0][1])
        was = found.properties.get("ID_SERIAL") or found.node.number  # as older versions recorded it
        lasting = self._lasting_link(found)
        return Device(
            key=unit,
            unit=unit,
            resource=group.resource,
            hardware=node_hardware(node),
            exclusive=node_hardware(node),
            identity=stands_for.identity or was,
            aliases=frozenset((was,)) if stands_for.identity else frozenset(),
            place=stands_for.place,
            nodes=container_nodes(node, group.options.permissions or default_permissions(self.host)),
            numa_node=sysfs.numa_node(self.host, found.path),
            attributes={
                **node_attributes(node),
                "id": (lasting or found.node.path.text.removeprefix("/dev/"),),
                **group.attributes,
            },
        )

    def _lasting_link(self, found: UdevDevice) -> str | None:
        """The name of the node that no other device claims and that does not depend on the order of plugging in, if any."""
        own = [link for kind in _LASTING for link in found.links if kind in f"/{link}" and link.isprintable()]
        if not own:
            return None
        numbers = (it for it in self._numbers(found.node.subsystem) or () if _are_siblings(it, found.node.number))
        others = {link for it in numbers if it != found.node.number for link in udev.links(self.host, it)}
        return next((link for link in own if link not in others), None)

    def _complaints(self, subsystem: str) -> Iterator[str]:
        """The problems of a subsystem in which groups match."""
        try:
            numbers = udev.numbers(self.host, subsystem)
        except OSError as error:
            yield f"the devices of {subsystem} cannot be listed: {reason_of(error)}"
            return
        if numbers is None:
            yield f"there is no {subsystem} in /sys/class or /sys/bus; is the name right, and its driver there?"
            return
        found = [device for number in numbers if (device := udev.read(self.host, number))]
        if not udev.has_database(self.host):
            yield from self._unknowable(subsystem, found)
            return
        for device in found:
            if not device.recorded and any(
                _fits_kernel(self.host, option, device) for _, option in self._wanted[subsystem]
            ):
                yield f"{device.node.path} is offered once udev has it in {udev.DATABASE}; is udevd running?"

    def _unknowable(self, subsystem: str, found: Sequence[UdevDevice]) -> Iterator[str]:
        """The problems of matches by what only udev knows, where there is no udev."""
        told = {name for device in found for name in device.properties}
        for group, option in self._wanted[subsystem]:
            names = [name for name in option.properties if name not in told and (told or name.startswith("ID_"))]
            if asked := [*names, *(f"the tag {tag}" for tag in option.tags)]:
                yield (
                    f"{group.resource} matches by {' and '.join(asked)}, which only udev knows, and there is no udev "
                    f"database at {udev.DATABASE}: it takes nothing. Mount the host's /run/udev, or match by "
                    "attributes or driver, which are in sysfs"
                )

    def ids(self, group: Group, device: Device) -> Sequence[str]:
        """Those of the device's tokens (see the module)."""
        return tokens(device.attributes["id"][0], group.options.count)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """The subsystems' events, and udev's database, which is written some time after them."""
        return Watches(frozenset(self._wanted), frozenset({udev.DATABASE}))

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:
        """The device of the number that an event, or a file of udev's database, names."""
        if isinstance(hint, Uevent):
            numbers = (hint.properties.get("MAJOR"), hint.properties.get("MINOR"))
            if hint.action == "change" or hint.subsystem not in self._wanted or None in numbers:
                return ()
            return self._claiming(f"{'b' if hint.subsystem == 'block' else 'c'}:{':'.join(map(str, numbers))}", known)
        if not isinstance(hint, PathChange):
            return ()
        if hint.path == udev.DATABASE:  # it is there, or watched, from now on
            return [unit for unit in known if unit.startswith(self.prefix)]
        if hint.path.parent != udev.DATABASE or (number := udev.entry_number(hint.path.name)) is None:
            return ()
        return self._claiming(number, known)

    def _claiming(self, number: str, known: Known) -> list[str]:
        """The device of a number, and those whose IDs may be others since it claims the same links, or did."""
        unit = f"{self.prefix}{number}"
        return [unit, *(it for it, devices in known.items() if devices and it != unit and _are_siblings(it, unit))]


def _are_siblings(one: str, other: str) -> bool:
    """Whether two devices have one kind and major, and so one driver. Only such devices claim one link."""
    return one.rpartition(":")[0] == other.rpartition(":")[0]


def _fits_kernel(host: Host, option: MatchOption, found: UdevDevice) -> bool:
    """Whether what sysfs says of the device, and of those above it, matches."""
    told = ((udev.driver(host, found.path), option.driver),) if option.driver is not None else ()
    attributes = ((udev.attribute(host, found.path, name), wanted) for name, wanted in option.attributes.items())
    return all(text is not None and fnmatchcase(text, wanted) for text, wanted in (*told, *attributes))


def _fits_udev(option: MatchOption, found: UdevDevice) -> bool:
    """Whether a device's properties and tags match."""
    return all(
        name in found.properties and fnmatchcase(found.properties[name], wanted)
        for name, wanted in option.properties.items()
    ) and all(any(fnmatchcase(tag, wanted) for tag in found.tags) for wanted in option.tags)
