"""Checks that systemd can find the device nodes that pods may have: those that it cannot, a daemon-reload takes from them.

Where systemd manages the pods' cgroups, runc tells it each node as /dev/char/MAJOR:MINOR, and leaves out one that is
neither there nor below /sys (its `cgroups/devices/systemd.go`). Of nodes that the kernel made there are both; NVIDIA's
are made by a program.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from agent.console.doctor.findings import Finding, fine, warning
from agent.inventory.inventory import Inventory
from agent.runtime.errors import some
from backends.base import Host, HostPath
from backends.linux.nodes import DeviceNode, NoNodeError, device_node

_SLICES: Final = ("fs/cgroup", "fs/cgroup/systemd", "fs/cgroup/devices")  # cgroup v2, and two hierarchies of v1
_NVIDIA: Final = "195"  # NVIDIA's major number (Documentation/admin-guide/devices.txt)


def node_links(host: Host, inventory: Inventory) -> Iterator[Finding]:
    """Which nodes of what is offered would running pods lose?"""
    if not any((host.sys / place / "kubepods.slice").is_dir() for place in _SLICES):
        yield fine("systemd manages no pods' cgroups here, as far as can be seen.")
        return
    lost = [node for node in _nodes(host, inventory) if not _is_found(host, node)]
    if not lost:
        yield fine("systemd finds every node that pods may have.")
        return
    nvidia = any(_link(node).name.startswith(f"{_NVIDIA}:") for node in lost)
    tool = "for NVIDIA's nodes, `nvidia-ctk system create-dev-char-symlinks --create-all` does it; " if nvidia else ""
    yield warning(
        f"{_link(lost[0])} is missing: the next `systemctl daemon-reload` takes {some([str(it.path) for it in lost])} "
        "from the pods that have it, for systemd manages their cgroups and finds nodes by these links.",
        f"At each boot, before pods start, link them: {tool}by hand it is `ln -s {lost[0].path} {_link(lost[0])}`.",
    )


def _nodes(host: Host, inventory: Inventory) -> Iterator[DeviceNode]:
    devices = (slot.device for name in inventory.names() for slot in inventory.slots(name).values())
    for path in dict.fromkeys(node.path for device in devices if device is not None for node in device.nodes):
        try:
            yield device_node(host, path)
        except NoNodeError:  # what that means is told of the device
            continue


def _is_found(host: Host, node: DeviceNode) -> bool:
    link = _link(node)
    return any(os.path.lexists(host.local(place)) for place in (link, HostPath(f"/sys{link}")))


def _link(node: DeviceNode) -> HostPath:
    kind = "block" if node.block else "char"
    return HostPath(f"/dev/{kind}/{node.major}:{node.minor}")
