"""Says of a USB stick whether a group selects it, which nodes a container gets and under which ID; makes devices of sticks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from backends.base import ANY_SUBSYSTEM, HEX4, NUMBER, TEXT, Attribute, Device, Grant, Hint, Host, Problem, Uevent
from backends.chardev import named_nodes
from backends.chardev.finder import Group
from backends.chardev.named_nodes import Member
from backends.chardev.options import CharDevResource, GroupOptions, listed
from backends.chardev.paths import node_attributes
from backends.chardev.selectors import UsbOption, usb_id
from backends.errors import reason_of
from backends.linux import usb
from backends.linux.nodes import NoNodeError
from backends.linux.usb import UsbDevice

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
            NotOfferedError: nobody can tell.
        """
        alike = self.alike(stick.vendor, stick.product)
        for index, serial in alike:
            if serial is None or serial == stick.serial:
                return index
        if alike and stick.serial_fault:
            raise NotOfferedError(f"its serial is not known, {stick.serial_fault}")
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


def stick(host: Host, options: GroupOptions, found: UsbDevice) -> Stick:
    """What a group that selects the stick hands out of it.

    Raises:
        NotOfferedError: it cannot be offered.
    """
    named_together = options.together == "all"  # then its own ID is not needed, and it need not have one
    return Stick(
        found, found.port if named_together else _id(found, options.id), _members(host, found, _kinds(options))
    )


def device(group: Group, unit: str, key: str, sticks: Sequence[Stick]) -> Device:
    """The device that these sticks are together, or that one is alone."""
    nodes = [node for one in sticks for node in one.nodes]
    owned = named_nodes.hardware(nodes)
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
        nodes=named_nodes.container_nodes(nodes, group.options.permissions or DEFAULT_PERMISSIONS, shared=shared),
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


def problem(unit: str, found: UsbDevice, group: Group, error: NotOfferedError) -> Problem | None:
    """The problem of a stick that is not offered; none while its drivers may still be starting."""
    if isinstance(error, NoNodesError) and found.connected is not None and found.connected < SETTLED:
        return None
    return Problem(unit, f"{named(found)} is not offered by {group.resource}: {error}")


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
        return [named_nodes.member(host, node) for node in found.nodes if node.subsystem in kinds]
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
