"""What the device manager believes of one resource after each event; pure.

Kubelet contract: A3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from agent.kubelet.wire import HEALTHY
from agent.simulation.changes import ResourceView

NO_NODE = -1  # the key under which the checkpoint keeps devices without topology


class Resource(Struct, frozen=True):
    """A resource's view, and the NUMA nodes of every device in its last list."""

    view: ResourceView
    nodes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def by_node(self, ids: Iterable[str]) -> dict[int, tuple[str, ...]]:
        """The devices sorted by NUMA node, as the checkpoint keeps them; one with two nodes stands twice.

        Raises:
            KeyError: a device is not in the last list.
        """
        sorted_out: dict[int, tuple[str, ...]] = {}
        for device in ids:
            for node in self.nodes[device] or (NO_NODE,):
                sorted_out[node] = (*sorted_out.get(node, ()), device)
        return sorted_out

    def crashes_restart(self, held: Collection[str]) -> str | None:
        """The held ID whose absence crashes a restarted kubelet, if one does.

        An allocated ID missing from the list, together with any device that has NUMA information, is a nil
        pointer to every topology manager policy but "none"; that worst case is assumed (kubelet contract: A7.2).
        """
        missing = sorted(set(held) - self.nodes.keys())
        return missing[0] if missing and any(self.nodes.values()) else None


def empty(name: str) -> Resource:
    """A resource that is known but has no devices: from a checkpoint, or after the grace period."""
    return Resource(ResourceView(name))


def listed(name: str, devices: Iterable[tuple[str, str, tuple[int, ...]]]) -> Resource:
    """The resource after a list: full replacement, a duplicate counted twice, only "Healthy" healthy (A3)."""
    nodes: dict[str, tuple[int, ...]] = {}
    healthy: list[str] = []
    unhealthy: list[str] = []
    for device, health, where in devices:
        nodes[device] = where
        (healthy if health == HEALTHY else unhealthy).append(device)
    view = ResourceView(name, len(healthy) + len(unhealthy), len(healthy), frozenset(healthy), frozenset(unhealthy))
    return Resource(view, nodes)


def lost(resource: Resource) -> Resource:
    """The resource after its plugin's end: every device unhealthy, capacity kept (A3)."""
    view = resource.view
    return replace(
        resource,
        view=replace(view, allocatable=0, healthy=frozenset(), unhealthy=view.unhealthy | view.healthy),
    )
