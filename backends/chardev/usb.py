"""USB sticks by vendor, product and serial; one device each, with its own node or those of its functions.

A unit is a port, `usb:1-2.3`. A stick's ID is vendor:product:serial; of one without a serial, or on request, the place
it is plugged in (`0000:00:14.0-usbv2-2.3`). Neither depends on what else is plugged in: of two sticks with one serial
the inventory offers one and refuses the other, by its duplicate ID, until the resource says id = "port".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final

from backends.base import (
    ANY_SUBSYSTEM,
    Device,
    Discovery,
    Grant,
    Hint,
    Host,
    Problem,
    Signal,
    Uevent,
    Watches,
)
from backends.chardev import members
from backends.chardev.members import Member
from backends.chardev.options import CharDevResource, listed
from backends.chardev.paths import node_attributes, tokens
from backends.chardev.selectors import UsbOption, usb_id
from backends.known import Known
from backends.linux import usb
from backends.linux.nodes import NoNodeError
from backends.linux.usb import UsbDevice

DEFAULT_PERMISSIONS: Final = "rw"
"""generic-device-plugin's for sticks."""

SETTLED: Final = 2000
"""Milliseconds that a stick's drivers have, after it was plugged in, before a node that is missing is a problem."""

_ALL: Final = "all"


class _NotOfferedError(Exception):
    """The stick is meant, but cannot be offered; the words follow its name."""


class _NoNodesError(_NotOfferedError):
    """Its nodes are not there, or not yet."""


class UsbSticks:
    """Finds the sticks that resources select."""

    prefix: ClassVar = "usb:"

    def __init__(self, host: Host, resources: Sequence[CharDevResource]) -> None:
        self.host = host
        self._wanted = [(resource, _Selectors(resource)) for resource in resources]

    @staticmethod
    def fixed_ids(_resource: CharDevResource) -> Iterable[str]:
        """None: sticks come and go."""
        return ()

    def units(self) -> Iterable[str]:
        """Every port where something is plugged in, and the root hubs; `usb:` alone where they cannot be listed."""
        try:
            return [f"{self.prefix}{port}" for port in usb.ports(self.host)]
        except OSError:
            return [self.prefix]

    def discover(self, unit: str) -> Discovery:
        """One device for each resource that takes the stick; what keeps a stick from being offered is a problem."""
        if unit == self.prefix:
            return Discovery(problems=tuple(self._unlistable()))
        stick = usb.read(self.host, unit.removeprefix(self.prefix))
        devices, problems = [], []
        for resource, selectors in self._wanted if stick else ():
            assert stick is not None
            try:
                if selectors.take(stick):
                    devices.append(self._device(unit, stick, resource))
            except _NotOfferedError as error:
                if not isinstance(error, _NoNodesError) or stick.connected is None or stick.connected >= SETTLED:
                    problems.append(Problem(unit, f"{_named(stick)} is not offered by {resource.name}: {error}"))
        return Discovery(tuple(devices), problems=tuple(problems))

    def _unlistable(self) -> Iterator[Problem]:
        try:
            usb.ports(self.host)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            yield Problem(self.prefix, f"USB devices cannot be listed: {usb.DIRECTORY} cannot be read: {why}")

    def _device(self, unit: str, stick: UsbDevice, resource: CharDevResource) -> Device:
        options = resource.spec.options
        found = _members(self.host, stick, _kinds(options.nodes))
        return Device(
            key=unit,
            unit=unit,
            resource=resource.name,
            hardware=members.hardware(found) | {unit},
            exclusive=members.hardware(found),
            identity=":".join((stick.vendor, stick.product, stick.serial or "")),
            nodes=members.container_nodes(found, options.permissions or DEFAULT_PERMISSIONS),
            numa_node=stick.numa_node,
            attributes={**node_attributes(found), **_attributes(stick), "id": (_id(stick, options.id),)},
        )

    def ids(self, resource: CharDevResource, device: Device) -> Sequence[str]:
        """Those of the stick's tokens (see the module)."""
        return tokens(device.attributes["id"][0], resource.spec.options.count)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """The events of USB and of the kinds of nodes that are handed out."""
        kinds = {kind for resource, _ in self._wanted for kind in _kinds(resource.spec.options.nodes)}
        return Watches(frozenset({ANY_SUBSYSTEM} if _ALL in kinds else {"usb", *kinds}))

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:  # noqa: ARG002  # an interface's
        """The stick that an event is about or happens below; nothing changes a stick but its coming and going."""
        if not isinstance(hint, Uevent) or hint.action == "change" or "/usb" not in hint.devpath:
            return ()
        port = usb.port_of(hint.devpath)
        return (f"{self.prefix}{port}",) if port else ()

    def probe(self, device: Device) -> Iterable[Signal]:
        """Are its nodes there?"""
        return members.signals(self.host, device)


def usb_env(resource: CharDevResource, grants: Sequence[Grant]) -> Mapping[str, str]:
    """KubeVirt's `USB_RESOURCE_…`: where virt-launcher finds the sticks, as bus:device."""
    name = resource.name.upper().translate(str.maketrans("/.", "__"))
    places = (f"{grant.device.attributes['bus'][0]}:{grant.device.attributes['device'][0]}" for grant in grants)
    return {f"USB_RESOURCE_{name}": ",".join(dict.fromkeys(places))}


class _Selectors:
    """What one resource selects, as sysfs would write it."""

    def __init__(self, resource: CharDevResource) -> None:
        self._selectors = [_selector(option) for _, option in listed("usb", resource.spec.options.usb)]

    def take(self, stick: UsbDevice) -> bool:
        """Is the stick meant?

        Raises:
            _NotOfferedError: nobody can tell.
        """
        told = [
            serial
            for vendor, product, serial in self._selectors
            if vendor == stick.vendor and product in (None, stick.product)
        ]
        if None in told or (stick.serial is not None and stick.serial in told):
            return True
        if told and stick.serial_fault:
            raise _NotOfferedError(f"its serial is not known, {stick.serial_fault}")
        return False


def _selector(option: UsbOption) -> tuple[str, str | None, str | None]:
    product = None if option.product is None else usb_id(option.product)
    return usb_id(option.vendor), product, option.serial


def _kinds(nodes: str | list[str]) -> Sequence[str]:
    return (nodes,) if isinstance(nodes, str) else nodes


def _members(host: Host, stick: UsbDevice, kinds: Sequence[str]) -> list[Member]:
    """The stick's nodes of these kinds.

    Raises:
        _NoNodesError: it has none of one of the kinds, or one is not in /dev, or is another there.
    """
    there = {node.subsystem for node in stick.nodes}
    if _ALL in kinds:
        kinds = ("usb", *there)
    if missing := [kind for kind in kinds if kind not in there]:
        raise _NoNodesError(f"it has no {' and no '.join(missing)} node; is its driver there?")
    try:
        return [members.member(host, node) for node in stick.nodes if node.subsystem in kinds]
    except NoNodeError as error:
        raise _NoNodesError(error.sentence) from None


def _id(stick: UsbDevice, by: str | None) -> str:
    """The stick's ID (see the module).

    Raises:
        _NotOfferedError: it has no such ID; another would not last.
    """
    if by != "port":
        if stick.serial is not None:
            return f"{stick.vendor}:{stick.product}:{stick.serial}"
        if stick.serial_fault:
            raise _NotOfferedError(
                f'its serial is not known, {stick.serial_fault}; plug it in again, or say id = "port"'
            )
        if by == "serial":
            raise _NotOfferedError('it has no serial; say id = "port"')
    if stick.place is None:
        raise _NotOfferedError("where it is plugged in cannot be told: its root hub does not say its version")
    return stick.place


def _attributes(stick: UsbDevice) -> dict[str, tuple[str, ...]]:
    told = {
        "vendor": stick.vendor,
        "product": stick.product,
        "serial": stick.serial,
        "manufacturer": stick.manufacturer,
        "product_name": stick.name,
        "speed": stick.speed,
        "port": stick.port,
        "place": stick.place,
        "bus": str(stick.bus),
        "device": str(stick.number),
    }
    return {name: (value,) for name, value in told.items() if value}


def _named(stick: UsbDevice) -> str:
    name = f" {stick.name}" if stick.name.isprintable() and stick.name else ""
    return f"USB device {stick.vendor}:{stick.product}{name} at {stick.port}"
