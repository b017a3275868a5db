"""What test_routes runs in an isolated child process: interfaces with routes, which the kernel is asked for."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from backends.linux import netdevs
from backends.linux.netlink import ROUTES
from tests.backends.trees import planted_host
from tests.discovery.sources.stages import Interface

SIOCSIFADDR, SIOCSIFNETMASK = 0x8916, 0x891C  # linux/sockios.h
NEW_ROUTE, REQUEST_CREATE_ACK = 24, 0x405  # linux/rtnetlink.h, linux/netlink.h
MAIN, BOOT, UNIVERSE, UNICAST, UNREACHABLE = 254, 3, 0, 1, 7
TO, GATEWAY, HOPS = 1, 5, 9
OUR_ROUTES = Path("/proc/self/net/route")


def asked(root: str, *, ours: bool = True, default: bool = True) -> list[str]:
    """The interfaces; `ours`: whether we are in the host's network namespace, or have no more than its file."""
    host = planted_host(Path(root))
    file = host.local(ROUTES)
    file.parent.mkdir(parents=True)
    if ours:
        file.symlink_to(OUR_ROUTES)
    else:
        file.write_text(OUR_ROUTES.read_text())
    found = netdevs.routes(host)
    assert found is not None
    return sorted(found.default if default else found.every)


def several_hops(root: str) -> list[list[str]]:
    """Without a default route; with one that has two next hops; with no more than what /proc shows of it."""
    with interfaces("t0", "t1", "t2") as gateways:
        found = [asked(f"{root}/none")]
        add_route(*gateways[:2])
        return [*found, asked(f"{root}/two"), asked(f"{root}/elsewhere", ours=False)]


def other_table(root: str) -> list[str]:
    """A default route in a table of its own, as of a VRF; and one that rejects."""
    with interfaces("t0", "t1") as gateways:
        add_route(gateways[1], table=77)
        add_route(table=78)
        return asked(root)


def half_of_everything(root: str) -> list[str]:
    """Half of all addresses go through one interface, as OpenVPN's `redirect-gateway def1` has it."""
    with interfaces("t0", "t1") as gateways:
        add_route(gateways[0], length=1)
        add_route(gateways[1], length=2)
        return asked(root)


def alone(root: str) -> list[list[str]]:
    """An address without a network, which has no connected route; and an interface that has none but its own fe80::."""
    with interfaces("t0", "t1"):
        set_address("t0", SIOCSIFNETMASK, "255.255.255.255")
        set_address("t1", SIOCSIFADDR, "0.0.0.0")
        return [asked(f"{root}/default"), asked(f"{root}/every", default=False)]


def many(root: str) -> list[str]:
    """More tables than the kernel tells of in one message."""
    with interfaces("t0", "t1") as gateways:
        for table in range(1, 251):
            add_route(gateways[0], table=table)
        add_route(gateways[1], table=251)
        return asked(root)


Gateway = tuple[int, bytes]
"""The interface's number, and an address behind it."""


@contextmanager
def interfaces(*names: str) -> Iterator[list[Gateway]]:
    """Interfaces that are up, with an address each."""
    with ExitStack() as stack:
        gateways = []
        for number, name in enumerate(names):
            interface = Interface(name)
            stack.callback(interface.remove)
            set_address(name, SIOCSIFADDR, f"10.0.{number}.2")
            set_address(name, SIOCSIFNETMASK, "255.255.255.0")
            interface.up(up=True)
            gateways.append((interface.index, ipaddress.ip_address(f"10.0.{number}.1").packed))
        yield gateways


def set_address(name: str, request: int, address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        packed = struct.pack("=16sHH4s8x", name.encode(), socket.AF_INET, 0, ipaddress.ip_address(address).packed)
        fcntl.ioctl(any_socket, request, packed)


def add_route(*gateways: Gateway, table: int = MAIN, length: int = 0) -> None:
    """A default route through all of these, or one to what begins with so many bits 0; through none, one that rejects."""
    hops = b"".join(
        struct.pack("=HBBi", 16, 0, 0, number) + attribute(GATEWAY, address) for number, address in gateways
    )
    kind = UNICAST if gateways else UNREACHABLE
    body = struct.pack("=BBBBBBBBI", socket.AF_INET, length, 0, 0, table, BOOT, UNIVERSE, kind, 0)
    body += attribute(TO, bytes(4)) if length else b""
    body += attribute(HOPS, hops) if hops else b""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(body), NEW_ROUTE, REQUEST_CREATE_ACK, 1, 0) + body)
        (failed,) = struct.unpack_from("=i", kernel.recv(4096), 16)
        assert failed == 0, f"the kernel refuses the route: {-failed}"


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value
