"""Asks a card's driver, by devlink, for the versions of what runs on the card.

Formats: include/uapi/linux/devlink.h and genetlink.h; Documentation/networking/devlink/devlink-info.rst.
"""

from __future__ import annotations

import struct
from typing import Final

from backends.base import Host
from backends.errors import not_short
from backends.linux.network import netlink

_GENERIC: Final = 16  # NETLINK_GENERIC
_CONTROL: Final = 16  # GENL_ID_CTRL, the family that knows the others
_GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 3, 1, 2  # CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME
_GET_INFO: Final = 51  # DEVLINK_CMD_INFO_GET
_BUS, _DEVICE = 1, 2  # DEVLINK_ATTR_BUS_NAME, DEVLINK_ATTR_DEV_NAME
_RUNNING, _NAME, _VALUE = 101, 103, 104  # DEVLINK_ATTR_INFO_VERSION_RUNNING, …_NAME, …_VALUE
_NESTED: Final = 0x8000  # NLA_F_NESTED, beside an attribute's type
_HEADER: Final = struct.Struct("=BBH")  # struct genlmsghdr: command, version, reserved


def running(host: Host, address: str) -> dict[str, str]:
    """Name → version of what runs on the PCI function (`fw.app.name`); empty where its driver does not say.

    Of most cards only the physical function answers, in the host's network namespace. May wait for the card's firmware.
    """
    try:
        if not netlink.is_of_host(host) or (family := _family()) is None:
            return {}
        return _running(family, address)
    except OSError as error:
        not_short(error)
        return {}


def _family() -> int | None:
    """The number that the kernel has given devlink; None if it has no devlink."""
    for kind, value in _asked(_CONTROL, _GET_FAMILY, netlink.text(_FAMILY_NAME, "devlink")):
        if kind == _FAMILY_ID and len(value) == 2:
            return int(struct.unpack("=H", value)[0])
    return None


def _running(family: int, address: str) -> dict[str, str]:
    found = {}
    for kind, value in _asked(family, _GET_INFO, netlink.text(_BUS, "pci") + netlink.text(_DEVICE, address)):
        if kind & ~_NESTED == _RUNNING:
            version = {of: bytes(text).rstrip(b"\0").decode(errors="replace") for of, text in netlink.parts(value)}
            found[version.get(_NAME, "")] = version.get(_VALUE, "")
    return found


def _asked(family: int, command: int, attributes: bytes) -> list[tuple[int, memoryview]]:
    """The attributes in the answer of the kernel; none if there is no answer."""
    request = _HEADER.pack(command, 1, 0) + attributes
    answers = netlink.answers(_GENERIC, family, netlink.REQUEST, request)
    return [found for kind, answer in answers if kind == family for found in netlink.parts(answer[_HEADER.size :])]
