"""In the guest: makes what can be made of a network interface, and says each time what the host is said to need it for.

`python -m tests.guest.uplinks ADDRESS` takes the first interface of a PCI function and prints a JSON object: kind → uses.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from backends.base import Host
from backends.linux import netlink, pci, sysfs
from backends.linux.host_uses import uses

MADE: Final = {
    "bridge": "ip link add x type bridge; ip link set {} master x",
    "bond": "ip link add x type bond; ip link set {0} down; ip link set {0} master x",
    "team": "ip link add x type team; ip link set {0} down; ip link set {0} master x",
    "vrf": "ip link add x type vrf table 7; ip link set {} master x",
    "vlan in a bridge": "ip link add y type bridge; ip link add x link {} type vlan id 5; ip link set x master y",
    "macvlan": "ip link add x link {} type macvlan",
    "ipvlan with the default route": "ip link add x link {} type ipvlan; ip link set {} up; ip addr add 192.0.2.1/24 dev x;"
    " ip link set x up; ip route add default via 192.0.2.2 dev x",
    "address": "ip link set {0} up; ip addr add 192.0.2.1/32 dev {0}",
    "up": "ip link set {} up",
}
UNMADE: Final = "ip link del x; ip link del y; ip addr flush dev {0}; ip link set {0} down"

_NEW_FAMILY, _FAMILY, _FAMILY_NAME = 3, 1, 2  # CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_ID and _NAME (linux/genetlink.h)
_GENERIC: Final = 16  # NETLINK_GENERIC in linux/netlink.h
_CREATE: Final = 0x5  # NLM_F_REQUEST | NLM_F_ACK


def main(address: str) -> None:
    """Make each in turn, and unmake it."""
    function = pci.read(Host(), address)
    assert function is not None
    (name, *_) = function.net
    said = {}
    for kind, commands in MADE.items():
        _shell(commands.format(name, name))
        said[kind] = list(uses(Host(), function))
        _shell(UNMADE.format(name))
    _open_vswitch(name)
    said["open vswitch"] = list(uses(Host(), function))
    said["entries"] = [
        entry for entry in sysfs.names(Host(), function.path / "net" / name) if entry.startswith("upper_")
    ]
    _ask("ovs_datapath", 2, _attribute(1, b"ovs-system\0"), command=2)
    print(json.dumps(said))


def _shell(commands: str) -> None:
    subprocess.run(commands, shell=True, check=False, stderr=subprocess.DEVNULL)


def _open_vswitch(name: str) -> None:
    """A datapath with the interface as a port and `br-ex` as one of its own, made as ovs-vswitchd makes them.

    Formats: include/uapi/linux/openvswitch.h.
    """
    nobody = _attribute(5, bytes(4))  # OVS_VPORT_ATTR_UPCALL_PID
    _ask("ovs_datapath", 2, _attribute(1, b"ovs-system\0") + _attribute(2, bytes(4)))
    index = socket.if_nametoindex("ovs-system")
    for kind, port in ((1, name), (2, "br-ex")):  # OVS_VPORT_TYPE_NETDEV, _INTERNAL
        told = _attribute(2, struct.pack("=I", kind)) + _attribute(3, f"{port}\0".encode()) + nobody
        _ask("ovs_vport", 1, told, index=index)
    _shell("ip addr add 192.0.2.1/24 dev br-ex; ip link set br-ex up; ip route add default via 192.0.2.2 dev br-ex")


def _ask(family: str, version: int, attributes: bytes, *, command: int = 1, index: int = 0) -> None:
    body = struct.pack("=BBHi", command, version, 0, index) + attributes
    head = netlink.HEADER.pack(netlink.HEADER.size + len(body), next(_family(family)), _CREATE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _GENERIC) as kernel:
        kernel.send(head + body)
        while (answer := kernel.recv(1 << 16))[4:6] != struct.pack("=H", netlink.ERROR):
            pass
    (failed,) = struct.unpack_from("=i", answer, netlink.HEADER.size)
    assert failed == 0, f"{family} refuses: {-failed}"


def _family(name: str) -> Iterator[int]:
    body = struct.pack("=BBH", _NEW_FAMILY, 1, 0) + _attribute(_FAMILY_NAME, f"{name}\0".encode())
    for _, answer in netlink.answers(_GENERIC, 0x10, netlink.REQUEST, body):  # GENL_ID_CTRL
        for kind, value in netlink.parts(answer[4:]):
            if kind == _FAMILY:
                yield int.from_bytes(value, sys.byteorder)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


if __name__ == "__main__":
    main(sys.argv[1])
