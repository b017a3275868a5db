"""Finds the network interfaces of a device, their kind and the state of their links; and which of them the host's routes need.

An interface that a CNI plugin has moved into a pod is not in the host's sysfs.
Files: Documentation/ABI/testing/sysfs-class-net.

The tables of routes in /proc show one next hop of an IPv4 route, and its main table alone. rtnetlink tells the rest, with the
table `local`, which has a route for each address; but it tells of the network namespace of this process: it is asked, too,
where that is the host's. Formats: net/ipv4/fib_trie.c and net/ipv6/route.c; rtnetlink(7), include/uapi/linux/rtnetlink.h.
"""

from __future__ import annotations

import re
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from msgspec import Struct

from backends.base import Host, HostPath, Known
from backends.errors import not_short
from backends.linux import netlink, sysfs

CLASS: Final = HostPath("/sys/class/net")

_KINDS: Final = {1: "Ethernet", 32: "InfiniBand"}  # ARPHRD_ETHER, ARPHRD_INFINIBAND in linux/if_arp.h
_DOWN: Final = frozenset({"down", "lowerlayerdown", "notpresent"})  # of operstate (RFC 2863); "unknown" is none
_IFF_UP: Final = 0x1  # IFF_UP: it was set up
_UPLINK: Final = re.compile(
    r"p[0-9]+"
)  # phys_port_name of a card's own port; those of its functions are pf0vf3, pf0sf88


def names(host: Host, device: HostPath) -> tuple[str, ...]:
    """The interfaces of a device, those of its first port first. Those of a virtio card are below its virtio device."""
    found = sysfs.names(host, device / "net")
    if not found:
        below = (name for name in sysfs.names(host, device) if name.startswith("virtio"))
        found = [name for virtio in below for name in sysfs.names(host, device / virtio / "net")]
    return tuple(found if len(found) < 2 else sorted(found, key=lambda name: (_port(host, name), name)))


def uplink(host: Host, device: HostPath) -> str | None:
    """A physical function's own interface; in switchdev mode those of its virtual functions' ports lie beside it."""
    found = names(host, device)
    own = (name for name in found if _UPLINK.fullmatch(sysfs.attribute(host, CLASS / name / "phys_port_name") or ""))
    return next(iter((*own, *found)) if len(found) > 1 else iter(found), None)


def bonded(host: Host, name: str) -> list[str]:
    """The interfaces of the bond that an interface is in, itself among them; none if it is in none.

    A bridge or Open vSwitch is a `master`, too. Files: Documentation/networking/bonding.rst.
    """
    master = sysfs.linked_name(host, CLASS / name / "master")
    return (sysfs.attribute(host, CLASS / master / "bonding/slaves") or "").split() if master else []


def link_layer(host: Host, name: str) -> str | None:
    """`Ethernet` or `InfiniBand`; None if it is neither, or unknown."""
    return _KINDS.get(sysfs.number(host, CLASS / name / "type") or 0)


def having(name: str, known: Known, attributes: Sequence[str] = ("ifname",)) -> list[str]:
    """The units with a device that names this interface in one of these attributes."""
    return [
        unit
        for unit, devices in known.items()
        if any(name in device.attributes.get(attribute, ()) for device in devices for attribute in attributes)
    ]


def down(host: Host, name: str) -> str | None:
    """The state of the link if it is down; None if it is up or unknown."""
    state = sysfs.attribute(host, CLASS / name / "operstate")
    return state if state in _DOWN else None


def is_enabled(host: Host, name: str) -> bool:
    """Whether the interface is set up (IFF_UP). Without a cable its link may still be down."""
    try:
        return bool(int(sysfs.attribute(host, CLASS / name / "flags") or "0", 16) & _IFF_UP)
    except ValueError:
        return False


def _port(host: Host, name: str) -> int:
    return sysfs.number(host, CLASS / name / "dev_port") or 0


# --- routes of the host ---


_ROUTES_6: Final = HostPath("/proc/1/net/ipv6_route")

_HEX: Final = re.compile("[0-9A-Fa-f]{1,32}")
_OF_NEIGHBOURS: Final = re.compile(
    "fe[89ab]|ff", re.IGNORECASE
)  # fe80::/10, ff00::/8: every interface that is up has them
_MOST_DEFAULT: Final[Mapping[int, int]] = {socket.AF_INET: 1, socket.AF_INET6: 3}
"""The longest prefixes of routes that stand in for a default route: 0.0.0.0/1 with 128.0.0.0/1, as of a VPN; 2000::/3."""
_RTF_UP: Final = 0x1  # RTF_UP in include/uapi/linux/route.h
_RTF_REJECT: Final = 0x200  # RTF_REJECT

_ASK, _ROUTE = 26, 24  # RTM_GETROUTE, RTM_NEWROUTE
_UNICAST, _LOCAL = 1, 2  # RTN_UNICAST, and RTN_LOCAL of an address; others reject, or are for broadcasts
_TO, _INTERFACE, _HOPS = 1, 4, 9  # RTA_DST, RTA_OIF, RTA_MULTIPATH
_MESSAGE: Final = struct.Struct("=BBBBBBBBI")  # struct rtmsg: family, length of the destination, …, type, flags
_HOP: Final = struct.Struct("=HBBi")  # struct rtnexthop: length, flags, weight, interface


class Routes(Struct, frozen=True):
    """The interfaces of the host that have routes."""

    default: frozenset[str]
    """Those that any default route leads through, of any table."""
    every: frozenset[str]
    """Those with any address or route; addresses that an interface has by itself (fe80::) do not count."""


def routes(host: Host) -> Routes | None:
    """The routes of the host; None if they cannot be read."""
    if (ipv4 := sysfs.text(host, netlink.ROUTES)) is None:
        return None
    every = {*_of_ipv4(ipv4), *_of_ipv6(sysfs.text(host, _ROUTES_6) or ""), *_told_by_kernel(host)}
    return Routes(frozenset(name for name, default in every if default), frozenset(name for name, _ in every))


_Route: TypeAlias = tuple[str, bool]
"""An interface, and whether a default route leads through it."""


def _of_ipv4(routes: str) -> Iterator[_Route]:
    for fields in map(str.split, routes.splitlines()):
        if len(fields) >= 8 and _leads(fields[3]):
            yield fields[0], _number(fields[7]).bit_count() <= _MOST_DEFAULT[socket.AF_INET]


def _of_ipv6(routes: str) -> Iterator[_Route]:
    for fields in map(str.split, routes.splitlines()):
        if len(fields) >= 10 and _leads(fields[8]) and not _OF_NEIGHBOURS.match(fields[0]):
            yield fields[9], _number(fields[1]) <= _MOST_DEFAULT[socket.AF_INET6]


def _leads(flags: str) -> bool:
    return _number(flags) & (_RTF_UP | _RTF_REJECT) == _RTF_UP


def _number(text: str) -> int:
    return int(text, 16) if _HEX.fullmatch(text) else 0


# --- rtnetlink ---


def _told_by_kernel(host: Host) -> Iterator[_Route]:
    """The next hops of every table, if we are in the network namespace of the host; else none."""
    try:
        numbers = {(number, _is_default(message)) for message in _dumped(host) for number in _interfaces(message)}
    except OSError as error:
        not_short(error)
        return
    for number, default in numbers:
        if (name := _name(number)) is not None:
            yield name, default


def _dumped(host: Host) -> Iterator[memoryview]:
    """Each route that leads somewhere, and each address, as the kernel's message without its header.

    Raises:
        OSError: the kernel does not tell.
    """
    request = _MESSAGE.pack(socket.AF_UNSPEC, 0, 0, 0, 0, 0, 0, 0, 0)
    told = netlink.answers(socket.NETLINK_ROUTE, _ASK, netlink.DUMP, request) if netlink.is_of_host(host) else ()
    for kind, body in told:
        if kind == _ROUTE and len(body) >= _MESSAGE.size and body[7] in (_UNICAST, _LOCAL):
            yield body


def _is_default(message: memoryview) -> bool:
    return message[7] == _UNICAST and message[1] <= _MOST_DEFAULT.get(message[0], -1)


def _interfaces(message: memoryview) -> Iterator[int]:
    """The numbers of the interfaces that a route leads through; none for a route that only leads to neighbours."""
    parts = list(netlink.parts(message[_MESSAGE.size :]))
    if any(kind == _TO and _OF_NEIGHBOURS.match(value.hex()) for kind, value in parts if len(value) == 16):
        return
    for kind, value in parts:
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
