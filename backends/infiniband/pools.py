"""All adapters of a resource together, many tokens for it: what k8s-rdma-shared-dev-plugin offers.

The pool is a unit of its own, put together of names and nodes without a question to any firmware: how its adapters are
is told by their own units, so that one that hangs holds up nobody else. They join the resource with no ID of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from backends.base import ContainerEdits, Device, Grant
from backends.infiniband.options import FROM_FIRMWARE, InfiniBandResource
from backends.interface.attributes import assumed

PREFIX: Final = "pool:"


def unit(resource: InfiniBandResource) -> str:
    """The unit that the resource's pool is."""
    return f"{PREFIX}{resource.name}"


def kept_from(resource: InfiniBandResource, device: Device, resources: Iterable[InfiniBandResource]) -> str | None:
    """The resource above this one that has the adapter, or may by what only its firmware knows; None: the pool has it.

    Pools that say `overlap` keep nothing from each other.
    """
    overlaps = resource.spec.options.overlap
    for other in resources:
        if other is resource:
            break
        may_be = assumed(device.attributes, FROM_FIRMWARE, (other,))
        if not (overlaps and other.spec.options.overlap) and other.refuses(replace(device, attributes=may_be)) is None:
            return other.name
    return None


def pool(resource: InfiniBandResource, members: Sequence[Device]) -> Device:
    """The one device that all tokens of the resource are of."""
    options = resource.spec.options
    adapters = frozenset[str]().union(*(member.hardware for member in members))
    hardware = frozenset({unit(resource)}) if options.overlap else adapters
    numa_nodes = {member.numa_node for member in members}
    return Device(
        key="pool",
        unit=unit(resource),
        resource=resource.name,
        hardware=hardware,
        parts=tuple(member.hardware for member in members),
        depends=adapters.union(*(member.depends for member in members)) - hardware,
        nodes=ContainerEdits.of(Grant(member.key, member) for member in members).nodes,
        numa_node=numa_nodes.pop() if options.topology and len(numa_nodes) == 1 else None,
        attributes=_attributes(resource, members),
    )


def _attributes(resource: InfiniBandResource, members: Sequence[Device]) -> Mapping[str, tuple[str, ...]]:
    """Those of all; but what the resource chooses by is the first's, as no mixture might be chosen."""
    names = dict.fromkeys(name for member in members for name in member.attributes)
    everything = {name: tuple(v for m in members for v in m.attributes.get(name, ())) for name in names}
    chosen_by = {name for table in (*resource.spec.select, *resource.spec.exclude) for name in table}
    first = members[0].attributes
    return {"pool": everything["hca"]} | {
        name: first.get(name, ()) if name in chosen_by else tuple(dict.fromkeys(values))
        for name, values in everything.items()
        if name not in ("dev", "port")
    }
