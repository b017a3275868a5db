"""Finds the interfaces that the host's default routes lead through, IPv4 and IPv6.

The tables in /proc show one next hop of an IPv4 route, and its main table alone. rtnetlink tells the rest, but of the
network namespace of this process: it is asked, too, where that is the host's.
Formats: net/ipv4/fib_trie.c and net/ipv6/route.c; rtnetlink(7), include/uapi/linux/rtnetlink.h.
"""

from __future__ import annotations

import re
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Final

from backends.base import Host, HostPath
from backends.errors import not_short
from backends.linux import sysfs
from backends.linux.network import netlink

_ROUTES_6: Final = HostPath("/proc/1/net/ipv6_route")

_ANYWHERE: Final = "00000000"
_ANYWHERE_6: Final = "0" * 32
_UP: Final = 0x1  # RTF_UP in include/uapi/linux/route.h
_REJECT: Final = 0x200  # RTF_REJECT

_ASK, _ROUTE = 26, 24  # RTM_GETROUTE, RTM_NEWROUTE
_UNICAST: Final = 1  # RTN_UNICAST: neither local nor one that rejects
_INTERFACE, _HOPS = 4, 9  # RTA_OIF, RTA_MULTIPATH
_MESSAGE: Final = struct.Struct("=BBBBBBBBI")  # struct rtmsg: family, length of the destination, …, type, flags
_HOP: Final = struct.Struct("=HBBi")  # struct rtnexthop: length, flags, weight, interface


def default_interfaces(host: Host) -> frozenset[str] | None:
    """The interfaces that any default route leads through; None if the routes cannot be read."""
    if (routes := sysfs.text(host, netlink.ROUTES)) is None:
        return None
    return frozenset((*_of_ipv4(routes), *_of_ipv6(sysfs.text(host, _ROUTES_6) or ""), *_told_by_kernel(host)))


def _of_ipv4(routes: str) -> Iterator[str]:
    for fields in map(str.split, routes.splitlines()):
        if len(fields) >= 8 and (fields[1], fields[7]) == (_ANYWHERE, _ANYWHERE) and _flags(fields[3]) & _UP:
            yield fields[0]


def _of_ipv6(routes: str) -> Iterator[str]:
    for fields in map(str.split, routes.splitlines()):
        if len(fields) >= 10 and (fields[0], fields[1]) == (_ANYWHERE_6, "00"):
            flags = _flags(fields[8])
            if flags & _UP and not flags & _REJECT:
                yield fields[9]


def _flags(text: str) -> int:
    return int(text, 16) if re.fullmatch("[0-9A-Fa-f]{1,8}", text) else 0


# --- rtnetlink ---


def _told_by_kernel(host: Host) -> frozenset[str]:
    """The next hops of every table, if we are in the network namespace of the host; else none."""
    try:
        numbers = {number for message in _dumped(host) for number in _interfaces(message)}
    except OSError as error:
        not_short(error)
        return frozenset()
    return frozenset(name for number in numbers if (name := _name(number)) is not None)


def _dumped(host: Host) -> Iterator[memoryview]:
    """Each default route, as the kernel's message without its header.

    Raises:
        OSError: the kernel does not tell.
    """
    request = _MESSAGE.pack(socket.AF_UNSPEC, 0, 0, 0, 0, 0, 0, 0, 0)
    told = netlink.answers(socket.NETLINK_ROUTE, _ASK, netlink.DUMP, request) if netlink.is_of_host(host) else ()
    for kind, body in told:
        if kind == _ROUTE and len(body) >= _MESSAGE.size and (body[1], body[7]) == (0, _UNICAST):
            yield body


def _interfaces(message: memoryview) -> Iterator[int]:
    """The numbers of the interfaces that a route leads through."""
    for kind, value in netlink.parts(message[_MESSAGE.size :]):
        if kind == _INTERFACE and len(value) == 4:
            yield int.from_bytes(value, sys.byteorder)
        elif kind == _HOPS:
            yield from _hops(value)


def _hops(value: memoryview) -> Iterator[int]:
    while len(value) >= _HOP.size:
        length, _, _, number = _HOP.unpack_from(value)
        yield number
        value = value[netlink.aligned(max(length, _HOP.size)) :]


def _name(number: int) -> str | None:
    try:
        return socket.if_indextoname(number)
    except OSError:
        return None
