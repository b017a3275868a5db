"""Makes one device of all adapters of a resource, with many tokens, as k8s-rdma-shared-dev-plugin does.

The pool is a unit of its own, made of names and nodes without a question to any firmware. The units of the adapters tell
their health, so that an adapter that hangs delays no other. Adapters join the resource without an ID.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from backends.base import ContainerEdits, Device, Grant
from backends.infiniband.options import FROM_FIRMWARE, InfiniBandResource
from backends.interface.written import assumed

PREFIX: Final = "pool:"


def unit(resource: InfiniBandResource) -> str:
    """The name of the resource's pool as a unit."""
    return f"{PREFIX}{resource.name}"


def kept_from(resource: InfiniBandResource, device: Device, resources: Iterable[InfiniBandResource]) -> str | None:
    """The earlier resource that has the adapter, or may have it by what only its firmware knows; None: the pool has it.

    Pools with `overlap` do not keep adapters from each other.
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
    """The one device behind all tokens of the resource."""
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
    """All values of the members; of what the resource selects by, the first member's alone: no mixture might match."""
    names = dict.fromkeys(name for member in members for name in member.attributes)
    everything = {name: tuple(v for m in members for v in m.attributes.get(name, ())) for name in names}
    chosen_by = {name for table in (*resource.spec.select, *resource.spec.exclude) for name in table}
    first = members[0].attributes
    return {"pool": everything["hca"]} | {
        name: first.get(name, ()) if name in chosen_by else tuple(dict.fromkeys(values))
        for name, values in everything.items()
        if name not in ("dev", "port")
    }
