"""Asks the kernel by netlink, and parses its answers.

The kernel answers about the network namespace of this process, which need not be the host's.
Formats: netlink(7), include/uapi/linux/netlink.h.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from backends.base import Host, HostPath

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
    """Is this process in the network namespace of the host?

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
