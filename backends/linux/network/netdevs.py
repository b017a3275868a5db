"""Finds the network interfaces of a device, and reads their kind and the state of their links.

An interface that a CNI plugin has moved into a pod is not in the host's sysfs.
Files: Documentation/ABI/testing/sysfs-class-net.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from backends.base import Host, HostPath, Known
from backends.linux import sysfs

CLASS: Final = HostPath("/sys/class/net")

_KINDS: Final = {1: "Ethernet", 32: "InfiniBand"}  # ARPHRD_ETHER, ARPHRD_INFINIBAND in linux/if_arp.h
_DOWN: Final = frozenset({"down", "lowerlayerdown", "notpresent"})  # of operstate (RFC 2863); "unknown" is none
_UP: Final = 0x1  # IFF_UP: it was set up
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
    """Is the interface set up (IFF_UP)? Without a cable its link may still be down."""
    try:
        return bool(int(sysfs.attribute(host, CLASS / name / "flags") or "0", 16) & _UP)
    except ValueError:
        return False


def _port(host: Host, name: str) -> int:
    return sysfs.number(host, CLASS / name / "dev_port") or 0
