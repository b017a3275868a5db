"""USB sticks by vendor, product and serial; one device each, with its own node or those of its functions.

A unit is a port, `usb:1-2.3`. A stick's ID is vendor:product:serial; of one without a serial, or on request, the place
it is plugged in (`0000:00:14.0-usbv2-2.3`). Neither depends on what else is plugged in: of two sticks with one serial
the inventory offers one and refuses the other, by its duplicate ID, until the group says id = "port".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from msgspec.structs import replace

from backends.base import Device, Discovery, Hint, Host, Problem, Watches
from backends.chardev.finder import Finder, Group
from backends.chardev.paths import tokens
from backends.chardev.usb import sticks
from backends.chardev.usb.sticks import NotOfferedError, Selectors
from backends.interface.values import Known
from backends.linux import usb
from backends.linux.usb import UsbDevice


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
        """One device for each resource that takes the stick; what keeps a stick from being offered is a problem."""
        if unit == self.prefix:
            why = sticks.unlistable(self.host)
            return Discovery(problems=(Problem(unit, why),) if why else ())
        found = usb.read(self.host, unit.removeprefix(self.prefix))
        devices: list[Device] = []
        problems: list[Problem] = []
        takers: set[str] = set()
        for group, selectors in self._wanted if found else ():
            assert found is not None
            if group.resource in takers:
                continue
            try:
                if selectors.first(found) is None:
                    continue
                takers.add(group.resource)
                devices.append(self._device(unit, found, group))
            except NotOfferedError as error:
                takers.add(group.resource)  # it is not the next group's until this one's nodes are there
                problems += filter(None, (sticks.problem(unit, found, group, error),))
        return Discovery(tuple(devices), problems=tuple(problems))

    def _device(self, unit: str, found: UsbDevice, group: Group) -> Device:
        stick = sticks.stick(self.host, group.options, found)
        device = sticks.device(group, unit, unit, [stick])
        return replace(device, attributes={**device.attributes, "id": (stick.id,)})

    def ids(self, group: Group, device: Device) -> Sequence[str]:
        """Those of the stick's tokens (see the module)."""
        return tokens(device.attributes["id"][0], group.options.count)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """The events of USB and of the kinds of nodes that are handed out."""
        return Watches(sticks.subsystems(group for group, _ in self._wanted))

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:  # noqa: ARG002  # an interface's
        """The stick that an event is about."""
        port = sticks.port_of(hint)
        return (f"{self.prefix}{port}",) if port else ()
