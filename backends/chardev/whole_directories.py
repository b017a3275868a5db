"""Makes one device of a directory such as /dev/snd: of every node below it.

What is plugged in later joins the device, which stays the same to a pod that has it: only new pods get the new nodes.
"""

from __future__ import annotations

from msgspec.structs import replace

from backends.base import Device, Host, HostPath
from backends.chardev import named_nodes
from backends.chardev.groups import Group
from backends.chardev.paths import MOST_MATCHES, container_node, container_path, node_attributes
from backends.linux.nodes import Fault, NoNodeError, links_to_file, nodes_below, numa_node


def device(host: Host, group: Group, unit: str, permissions: str) -> Device:
    """The device that the directory at the path `unit` is; its nodes have these permissions by default.

    Raises:
        NoNodeError: it cannot be listed, or has no node.
    """
    path = HostPath(unit)
    found = nodes_below(host, path, MOST_MATCHES)
    if not found:
        raise NoNodeError(Fault.DIRECTORY, f"{path} is a directory with no device node below it")
    option = group.options.paths[0]
    inside = container_path(option, path)
    own = named_nodes.hardware(found)
    hardware = frozenset({f"shared:{group.resource}{path}"}) if option.shared else own | {f"directory:{path}"}
    links = frozenset(f"path:{target}" for target in links_to_file(host, path))
    numa_nodes = {numa_node(host, node) for _, node in found} - {None}
    nodes = [(container_node(option, each, permissions), each.text.removeprefix(unit)) for each, _ in found]
    return Device(
        key=unit,
        unit=unit,
        resource=group.resource,
        hardware=hardware,
        exclusive=hardware,
        depends=links | own if option.shared else links,
        identity=unit,
        nodes=tuple(replace(node, container_path=inside + below) for node, below in nodes),
        numa_node=numa_nodes.pop() if len(numa_nodes) == 1 else None,
        attributes={**node_attributes(found), "path": (unit,), "name": (path.name,), **group.attributes},
    )


def directories(device: Device) -> set[HostPath]:
    """The directories to watch for such a device: itself, and those of its nodes; none for a device of another kind."""
    return (
        {HostPath(device.key), *(node.path.parent for node in device.nodes)} if device.identity == device.key else set()
    )
