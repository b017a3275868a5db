"""USB sticks by vendor, product and serial: each a device of its own, or several as one.

A unit of single sticks is a port, `usb:1-2.3`; a stick has its own node or those of its functions. Its ID is
vendor:product:serial; of one without a serial, or on request, the place it is plugged in (`0000:00:14.0-usbv2-2.3`). Neither
depends on what else is plugged in: of two sticks with one serial the inventory offers one and refuses the other, by its
duplicate ID, until the group says id = "port".

A unit of sets is a group, `usb-set:<resource>`. Of sets of one stick each (KubeVirt's), the sticks of each selector are sorted
by ID and paired by their order, and a set's ID is that of its first selector's stick, which only it has. All sticks
together (generic-device-plugin's) are one device, whose ID says what selects them. If other sticks join or leave a
set, its identity changes: a pod that holds the ID keeps it, as one whose device was replaced.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final

from msgspec import Struct
from msgspec.structs import replace

from backends.base import (
    ANY_SUBSYSTEM,
    HEX4,
    NUMBER,
    TEXT,
    Attribute,
    Device,
    Discovery,
    Grant,
    Hint,
    Host,
    Known,
    Problem,
    Uevent,
    Watches,
)
from backends.chardev.finder import (
    Finder,
    Group,
    Member,
    container_nodes,
    member,
    node_attributes,
    node_hardware,
    tokens,
)
from backends.chardev.options import CharDevResource, GroupOptions, UsbOption, listed, usb_id
from backends.errors import reason_of
from backends.linux import usb
from backends.linux.nodes import NoNodeError
from backends.linux.usb import UsbDevice

# --- each a device of its own ---


class UsbSticks(Finder):
    """Finds the sticks that groups select."""

    prefix: ClassVar = "usb:"

    def __init__(self, host: Host, groups: Sequence[Group]) -> None:
        super().__init__(host, groups)
        self._wanted = [(group, Selectors(group.options)) for group in groups]

    def units(self) -> Iterable[str]:
        """Every port where something is plugged in, and the root hubs; `usb:` alone where they cannot be listed."""
        try:
            return [f"{self.prefix}{port}" for port in usb.ports(self.host)]
        except OSError:
            return [self.prefix]

    def discover(self, unit: str) -> Discovery:
        """One device for each resource that takes the stick, unusable where something keeps it from being offered."""
        if unit == self.prefix:
            why = unlistable(self.host)
            return Discovery(problems=(Problem(unit, why),) if why else ())
        found = usb.read(self.host, unit.removeprefix(self.prefix))
        devices: list[Device] = []
        problems: list[Problem] = []
        takers: set[str] = set()
        settling: list[float] = []
        for group, selectors in self._wanted if found else ():
            assert found is not None
            if group.resource in takers:
                continue
            try:
                if selectors.first(found) is None:
                    continue
                devices.append(self._device(unit, found, group))
            except UnknownStickError as error:
                problems.append(stick_problem(unit, found, group, error))
            except NotOfferedError as error:
                if left := settles_in(found, error):
                    settling.append(left)
                else:
                    devices.append(_unusable(unit, found, group, str(error)))
            takers.add(group.resource)  # it is not the next group's until this one's nodes are there
        return Discovery(tuple(devices), problems=tuple(problems), settles=min(settling, default=0.0))

    def _device(self, unit: str, found: UsbDevice, group: Group) -> Device:
        stick = stick_of(self.host, group.options, found)
        device = stick_device(group, unit, unit, [stick])
        return replace(device, attributes={**device.attributes, "id": (stick.id,)})

    def ids(self, group: Group, device: Device) -> Sequence[str]:
        """Those of the stick's tokens (see the module)."""
        return tokens(device.attributes["id"][0], group.options.count)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """The events of USB and of the kinds of nodes that are handed out."""
        return Watches(subsystems(group for group, _ in self._wanted))

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:  # noqa: ARG002  # an interface's
        """The stick that an event is about."""
        port = port_of(hint)
        return (f"{self.prefix}{port}",) if port else ()


def _unusable(unit: str, found: UsbDevice, group: Group, why: str) -> Device:
    """The stick that is plugged in, and that no pod can get for this reason."""
    return replace(stick_device(group, unit, unit, [Stick(found, "", ())]), unusable=why)


# --- several as one ---


class StickSets(Finder):
    """Finds the sticks that groups hand out together."""

    prefix: ClassVar = "usb-set:"

    def __init__(self, host: Host, groups: Sequence[Group]) -> None:
        super().__init__(host, groups)
        self._groups = {f"{self.prefix}{group.name}": (group, Selectors(group.options)) for group in groups}

    def units(self) -> Iterable[str]:
        """The groups."""
        return self._groups

    def discover(self, unit: str) -> Discovery:
        """The group's sets, and why there are no more."""
        if unit not in self._groups:
            return Discovery()
        if why := unlistable(self.host):
            return Discovery(problems=(Problem(unit, why),))
        group, selectors = self._groups[unit]
        problems: list[Problem] = []
        found: list[list[Stick]] = [[] for _ in selectors.names]
        settling: list[float] = []
        for index, stick in self._sticks(unit, problems, settling):
            found[index].append(stick)
        ordered = [sorted(each, key=lambda stick: stick.id) for each in found]
        if group.options.together == "all":
            every = [stick for each in ordered for stick in each]
            devices = [stick_device(group, unit, "+".join(selectors.names), every)] if every else []
        else:
            devices = [stick_device(group, unit, held[0].id, held) for held in zip(*ordered, strict=False)]
            problems += [Problem(unit, why, group.resource) for why in _shortage(group, selectors.names, ordered)]
        return Discovery(tuple(devices), problems=tuple(problems), settles=min(settling, default=0.0))

    def _sticks(self, unit: str, problems: list[Problem], settling: list[float]) -> Iterator[tuple[int, Stick]]:
        """Yield the sticks that the group's selectors take, each with the index of its selector; no ID comes twice.

        Why others are not there goes to `problems`, or, where their drivers may still be starting, for how long to `settling`.
        """
        group, selectors = self._groups[unit]
        seen: dict[str, str] = {}
        for port in usb.ports(self.host):
            if not selectors.alike(*usb.ids(self.host, port)) or (found := usb.read(self.host, port)) is None:
                continue
            try:
                if (index := selectors.first(found)) is None:
                    continue
                stick = stick_of(self.host, group.options, found)
                if (other := seen.setdefault(stick.id, port)) != port:
                    raise NotOfferedError(f'its serial is also that of the one at {other}; say id = "port"')
                yield index, stick
            except NotOfferedError as error:
                if left := settles_in(found, error):
                    settling.append(left)
                else:
                    problems.append(stick_problem(unit, found, group, error))

    def ids(self, group: Group, device: Device) -> Sequence[str]:
        """The tokens of the set (see the module)."""
        return tokens(device.key, group.options.count)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """The events of USB and of the kinds of nodes that are handed out."""
        return Watches(subsystems(group for group, _ in self._groups.values()))

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:  # noqa: ARG002  # an interface's
        """All groups, as soon as any stick comes or goes."""
        return tuple(self._groups) if port_of(hint) else ()


def _shortage(group: Group, names: Sequence[str], found: Sequence[Sequence[Stick]]) -> Iterator[str]:
    """Why some of the sticks are in no set."""
    scarce, least = min(zip(names, found, strict=True), key=lambda one: len(one[1]))
    for name, each in zip(names, found, strict=True):
        if len(each) > len(least):
            yield (
                f"{group.resource}: {len(each)} of {name} and {len(least)} of {scarce} are plugged in: what is left over is "
                "in no set"
            )


# --- what both share ---


DEFAULT_PERMISSIONS: Final = "rw"
"""generic-device-plugin's for sticks."""

SETTLED: Final = 2000
"""Milliseconds that a stick's drivers have, after it was plugged in, before a node that is missing is a problem."""

_ALL: Final = "all"
_MOST_ALIASES: Final = 256  # of several sticks as one device: there may be any number of them

_MODES: Final = (
    {("1a6e", "089a"), ("18d1", "9302")},
    {("03e7", "2150"), ("040e", "f63b")},
    {("03e7", "2485"), ("03e7", "f63b")},
)
"""Vendor and product of sticks before and after they were sent their firmware: Google's Coral (libedgetpu's udev rules),
Intel's Movidius of both generations (97-usbboot.rules of the NCSDK, 97-myriad-usbboot.rules of OpenVINO)."""


class NotOfferedError(Exception):
    """The stick is meant, but cannot be offered; the words follow its name."""


class UnknownStickError(NotOfferedError):
    """Whether it is meant cannot be told."""


class NoNodesError(NotOfferedError):
    """Its nodes are not there, or not yet."""


class Stick(Struct, frozen=True):
    """A USB device that a group takes."""

    usb: UsbDevice
    id: str
    """Among those of its group."""
    nodes: Sequence[Member]
    """Those that a container gets."""


class Selectors:
    """What one group selects, as sysfs would write it."""

    def __init__(self, options: GroupOptions) -> None:
        self._selectors = [_selector(option) for _, option in listed("usb", options.usb)]

    @property
    def names(self) -> list[str]:
        """What each of them takes, in a word."""
        return [
            ":".join((vendor, product or "*", *filter(None, (serial,)))) for vendor, product, serial in self._selectors
        ]

    def alike(self, vendor: str | None, product: str | None) -> list[tuple[int, str | None]]:
        """The selectors that may mean a stick of this vendor and product, each with the serial that it asks for."""
        return [
            (index, serial)
            for index, (wanted, of, serial) in enumerate(self._selectors)
            if wanted == vendor and of in (None, product)
        ]

    def first(self, stick: UsbDevice) -> int | None:
        """Which of them means the stick, if any does.

        Raises:
            UnknownStickError: that cannot be told.
        """
        alike = self.alike(stick.vendor, stick.product)
        for index, serial in alike:
            if serial is None or serial == stick.serial:
                return index
        if alike and stick.serial_fault:
            raise UnknownStickError(f"its serial is not known, {stick.serial_fault}")
        return None

    def other_modes(self, stick: UsbDevice) -> frozenset[str]:
        """The identities that the same stick may have had: before it was sent its firmware, or was switched to be a modem.

        Both must be selected here. Of a stick that is not known to do so, vendor and serial must stay the same.
        """
        serial, ids = stick.serial or "", (stick.vendor, stick.product)
        known = {other for modes in _MODES if ids in modes for other in modes if self.alike(*other)}
        found = {f"{vendor}:{product}:{told}" for vendor, product in known for told in ("", serial)}
        if serial:
            named = {(vendor, product) for vendor, product, _ in self._selectors if vendor == stick.vendor and product}
            found |= {f"{vendor}:{product}:{serial}" for vendor, product in named}
        return frozenset(found) - {_identity(stick)}


def _identity(stick: UsbDevice) -> str:
    return ":".join((stick.vendor, stick.product, stick.serial or ""))


def _selector(option: UsbOption) -> tuple[str, str | None, str | None]:
    product = None if option.product is None else usb_id(option.product)
    return usb_id(option.vendor), product, option.serial


def stick_of(host: Host, options: GroupOptions, found: UsbDevice) -> Stick:
    """What a group that selects the stick hands out of it.

    Raises:
        NotOfferedError: it cannot be offered.
    """
    named_together = options.together == "all"  # then its own ID is not needed, and it need not have one
    return Stick(
        found, found.port if named_together else _id(found, options.id), _members(host, found, _kinds(options))
    )


def stick_device(group: Group, unit: str, key: str, sticks: Sequence[Stick]) -> Device:
    """The device that these sticks are together, or that one is alone."""
    nodes = [node for one in sticks for node in one.nodes]
    owned = node_hardware(nodes)
    ports = frozenset(f"usb:{one.usb.port}" for one in sticks)
    shared = group.options.shared
    numa_nodes = {one.usb.numa_node for one in sticks} - {None}
    return Device(
        key=key,
        unit=unit,
        resource=group.resource,
        hardware=frozenset({f"shared:{group.name}/{key}"}) if shared else owned | ports,
        exclusive=frozenset() if shared else owned,
        depends=owned | ports if shared else frozenset(),
        identity=" + ".join(_identity(one.usb) for one in sticks),
        aliases=_aliases([one.usb for one in sticks], Selectors(group.options)),
        place=frozenset[str]().union(*(one.usb.places for one in sticks)),
        nodes=container_nodes(nodes, group.options.permissions or DEFAULT_PERMISSIONS, shared=shared),
        numa_node=numa_nodes.pop() if len(numa_nodes) == 1 else None,
        attributes={**node_attributes(nodes), **_attributes([one.usb for one in sticks]), **group.attributes},
    )


def _aliases(sticks: Sequence[UsbDevice], selectors: Selectors) -> frozenset[str]:
    """The identities that these sticks together may have had."""
    modes = [(_identity(stick), *sorted(selectors.other_modes(stick))) for stick in sticks]
    if not any(others for _, *others in modes):
        return frozenset()
    return frozenset(" + ".join(told) for told in itertools.islice(itertools.product(*modes), 1, _MOST_ALIASES))


def usb_env(resource: CharDevResource, grants: Iterable[Grant]) -> Mapping[str, str]:
    """KubeVirt's `USB_RESOURCE_…`: where virt-launcher finds the sticks, as bus:device."""
    places = [
        f"{bus}:{number}"
        for grant in grants
        for bus, number in zip(*(grant.device.attributes.get(key, ()) for key in ("bus", "device")), strict=True)
    ]
    return {resource.variable("USB_RESOURCE"): ",".join(dict.fromkeys(places))} if places else {}


def settles_in(found: UsbDevice, error: NotOfferedError) -> float:
    """Seconds for which the drivers of a stick that is not offered may still be starting; 0 if that is a problem."""
    if not isinstance(error, NoNodesError) or found.connected is None:
        return 0.0
    return max(0, SETTLED - found.connected) / 1000


def stick_problem(unit: str, found: UsbDevice, group: Group, error: NotOfferedError) -> Problem:
    """The problem of a stick that is not offered, once its drivers have had their time."""
    return Problem(unit, f"{named(found)} is not offered by {group.resource}: {error}", group.resource)


def unlistable(host: Host) -> str | None:
    """Why USB devices cannot be listed, if they cannot."""
    try:
        usb.ports(host)
    except OSError as error:
        return f"USB devices cannot be listed: {usb.DIRECTORY} cannot be read: {reason_of(error)}"
    return None


def port_of(hint: Hint) -> str | None:
    """The port of the stick that an event is about; `change` events change nothing of a stick."""
    if not isinstance(hint, Uevent) or hint.action == "change" or "/usb" not in hint.devpath:
        return None
    return usb.port_of(hint.devpath)


def subsystems(groups: Iterable[Group]) -> frozenset[str]:
    """The subsystems whose events tell of the groups' sticks and their nodes."""
    kinds = {kind for group in groups for kind in _kinds(group.options)}
    return frozenset({ANY_SUBSYSTEM} if _ALL in kinds else {"usb", *kinds})


def named(found: UsbDevice) -> str:
    """The stick's name for a person."""
    name = f" {found.name}" if found.name.isprintable() and found.name else ""
    return f"USB device {found.vendor}:{found.product}{name} at {found.port}"


def _kinds(options: GroupOptions) -> Sequence[str]:
    return (options.nodes,) if isinstance(options.nodes, str) else options.nodes


def _members(host: Host, found: UsbDevice, kinds: Sequence[str]) -> list[Member]:
    """The stick's nodes of these kinds.

    Raises:
        NoNodesError: it has none of one of the kinds, or one is not in /dev, or is another there.
    """
    there = {node.subsystem for node in found.nodes}
    if _ALL in kinds:
        kinds = ("usb", *there)
    if missing := [kind for kind in kinds if kind not in there]:
        raise NoNodesError(f"it has no {' and no '.join(missing)} node; is its driver there?")
    try:
        return [member(host, node) for node in found.nodes if node.subsystem in kinds]
    except NoNodeError as error:
        raise NoNodesError(error.sentence) from None


def _id(found: UsbDevice, by: str | None) -> str:
    """The stick's ID: vendor:product:serial, or the place it is plugged in.

    Raises:
        NotOfferedError: it has no such ID; another would not last.
    """
    if by != "port":
        if found.serial is not None:
            return f"{found.vendor}:{found.product}:{found.serial}"
        if found.serial_fault:
            raise NotOfferedError(
                f'its serial is not known, {found.serial_fault}; plug it in again, or say id = "port"'
            )
        if by == "serial":
            raise NotOfferedError('it has no serial; say id = "port"')
    if found.place is None:
        raise NotOfferedError("where it is plugged in cannot be told: its root hub does not say its version")
    return found.place


ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    "vendor": HEX4,
    "product": HEX4,
    **dict.fromkeys(("serial", "manufacturer", "product_name", "speed", "port", "place"), TEXT),
    "bus": NUMBER,
    "device": NUMBER,
}
"""Those of a USB device; `device` is its number on the bus."""


def _attributes(sticks: Sequence[UsbDevice]) -> dict[str, tuple[str, ...]]:
    told = [
        {
            "vendor": found.vendor,
            "product": found.product,
            "serial": found.serial,
            "manufacturer": found.manufacturer,
            "product_name": found.name,
            "speed": found.speed,
            "port": found.port,
            "place": found.place,
            "bus": str(found.bus),
            "device": str(found.number),
        }
        for found in sticks
    ]
    attributes = {name: tuple(value for facts in told if (value := facts[name])) for name in (told[0] if told else ())}
    return {name: values for name, values in attributes.items() if values}
