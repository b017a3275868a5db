"""Asks the kernel by netlink and parses its answers; by devlink, what runs on a card.

The kernel answers about the network namespace of this process, which need not be the host's.
Formats: netlink(7), include/uapi/linux/netlink.h; of devlink include/uapi/linux/devlink.h and genetlink.h,
Documentation/networking/devlink/devlink-info.rst.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from backends.base import Host, HostPath
from backends.errors import not_short

ROUTES: Final = HostPath("/proc/1/net/route")
"""The host's own IPv4 routes, not those of the container that we may be in."""

HEADER: Final = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence, port."""
ATTRIBUTE: Final = struct.Struct("=HH")
"""struct nlattr: length, type."""

REQUEST: Final = 0x1  # NLM_F_REQUEST
DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
ERROR, DONE = 2, 3  # NLMSG_ERROR, NLMSG_DONE

_OURS: Final = Path("/proc/self/net/route")  # in this process's own /proc, wherever the host's is seen
_BATCH_BYTES: Final = 32 << 10  # the longest that the kernel makes
_PATIENCE: Final = 2.0  # seconds for one batch; the kernel has it ready


def is_of_host(host: Host) -> bool:
    """Whether this process is in the network namespace of the host.

    Each network namespace has inodes of its own in every /proc. To compare /proc/1/ns/net would take CAP_SYS_PTRACE.

    Raises:
        OSError: it cannot be told.
    """
    return host.local(ROUTES).stat().st_ino == _OURS.stat().st_ino


def answers(family: int, kind: int, flags: int, body: bytes) -> Iterator[tuple[int, memoryview]]:
    """The type and the body of each message that answers one request.

    Raises:
        OSError: it does not answer.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family) as asked:
        asked.settimeout(_PATIENCE)
        asked.sendto(HEADER.pack(HEADER.size + len(body), kind, flags, 1, 0) + body, (0, 0))
        while True:
            for answer, content in parts(memoryview(asked.recv(_BATCH_BYTES)), HEADER):
                if answer in (DONE, ERROR):
                    return
                yield answer, content
            if flags != DUMP:
                return


def parts(data: memoryview, header: struct.Struct = ATTRIBUTE) -> Iterator[tuple[int, memoryview]]:
    """The type and content of each message or attribute: both begin with length and type."""
    while len(data) >= header.size:
        length, kind, *_ = header.unpack_from(data)
        if length < header.size:
            return
        yield kind, data[header.size : length]
        data = data[aligned(length) :]


def text(kind: int, value: str) -> bytes:
    """A text as an attribute."""
    content = value.encode() + b"\0"
    return ATTRIBUTE.pack(ATTRIBUTE.size + len(content), kind) + content + bytes(-len(content) % 4)


def aligned(length: int) -> int:
    """The offset of what follows (NLMSG_ALIGN, NLA_ALIGN)."""
    return length + 3 & ~3


# --- devlink ---


_GENERIC: Final = 16  # NETLINK_GENERIC
_CONTROL: Final = 16  # GENL_ID_CTRL, the family that knows the others
_GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 3, 1, 2  # CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_ID, CTRL_ATTR_FAMILY_NAME
_GET_INFO: Final = 51  # DEVLINK_CMD_INFO_GET
_BUS, _DEVICE = 1, 2  # DEVLINK_ATTR_BUS_NAME, DEVLINK_ATTR_DEV_NAME
_RUNNING, _NAME, _VALUE = 101, 103, 104  # DEVLINK_ATTR_INFO_VERSION_RUNNING, …_NAME, …_VALUE
_NESTED: Final = 0x8000  # NLA_F_NESTED, beside an attribute's type
_HEADER: Final = struct.Struct("=BBH")  # struct genlmsghdr: command, version, reserved


def devlink_versions(host: Host, address: str) -> dict[str, str]:
    """Name → version of what runs on the PCI function (`fw.app.name`); empty where its driver does not say.

    Of most cards only the physical function answers, in the host's network namespace. May wait for the card's firmware.
    """
    try:
        if not is_of_host(host) or (family := _family()) is None:
            return {}
        return _running(family, address)
    except OSError as error:
        not_short(error)
        return {}


def _family() -> int | None:
    """The number that the kernel has given devlink; None if it has no devlink."""
    for kind, value in _asked(_CONTROL, _GET_FAMILY, text(_FAMILY_NAME, "devlink")):
        if kind == _FAMILY_ID and len(value) == 2:
            return int(struct.unpack("=H", value)[0])
    return None


def _running(family: int, address: str) -> dict[str, str]:
    found = {}
    for kind, value in _asked(family, _GET_INFO, text(_BUS, "pci") + text(_DEVICE, address)):
        if kind & ~_NESTED == _RUNNING:
            version = {of: bytes(told).rstrip(b"\0").decode(errors="replace") for of, told in parts(value)}
            found[version.get(_NAME, "")] = version.get(_VALUE, "")
    return found


def _asked(family: int, command: int, attributes: bytes) -> list[tuple[int, memoryview]]:
    """The attributes in the answer of the kernel; none if there is no answer."""
    request = _HEADER.pack(command, 1, 0) + attributes
    said = answers(_GENERIC, family, REQUEST, request)
    return [found for kind, answer in said if kind == family for found in parts(answer[_HEADER.size :])]
