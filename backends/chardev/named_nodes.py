"""Nodes that the kernel names for a device: finds them in /dev, and says what a device owns with them and how they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from backends.base import Device, Host, HostPath, Node, Signal
from backends.chardev.paths import node_signal
from backends.linux.nodes import DeviceNode, Fault, NoNodeError, device_node
from backends.linux.sysfs import KernelNode

Member = tuple[HostPath, DeviceNode]


def member(host: Host, named: KernelNode) -> Member:
    """The node in /dev that the kernel has named.

    Raises:
        NoNodeError: it is not there, or is another.
    """
    node = device_node(host, named.path)
    if node.number != named.number:
        raise NoNodeError(Fault.OTHER, f"{named.path} is {node.number}, but the kernel says {named.number}")
    return named.path, node


def hardware(members: Iterable[Member]) -> frozenset[str]:
    """The hardware of a device with these nodes: no other resource may have a device with one of them."""
    return frozenset(f"node:{node.number}" for _, node in members)


def container_nodes(members: Sequence[Member], permissions: str, *, shared: bool = False) -> tuple[Node, ...]:
    """As a container gets them, at the host's paths."""
    return tuple(Node(path, path.text, permissions, shared) for path, _ in members)


def signals(host: Host, device: Device) -> Iterator[Signal]:
    """The signals of nodes that are missing or replaced, of a device with the attributes of `node_attributes`."""
    told = (device.attributes[name] for name in ("path", "type", "major", "minor"))
    for path, kind, major, minor in zip(*told, strict=True):
        number = f"{kind[0]}:{major}:{minor}"
        if signal := node_signal(host, f"node:{number}", path, number):
            yield signal
