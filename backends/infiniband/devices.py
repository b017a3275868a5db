"""Makes a device of the RDMA adapter at a place, or says why it cannot be offered; and one of all adapters of a resource.

A physical function owns two pieces of hardware: `pci:` itself, and `rdma:` the adapter with its ports. Virtual functions
and subfunctions depend on the first alone: their traffic goes on when the physical function's own port is down.

A pool, one device with many tokens as of k8s-rdma-shared-dev-plugin, is a unit of its own, made of names and nodes without a
question to any firmware. The units of the adapters tell their health, so that an adapter that hangs delays no other. Adapters
join the resource without an ID.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from backends.base import TEXT, Attribute, ContainerEdits, Device, Grant, Host, Node, one_of
from backends.infiniband.options import FROM_FIRMWARE, UNSEEN_WHEN_AWAY, InfiniBandResource
from backends.infiniband.ports import PortState, State
from backends.interface.written import assumed, mismatch
from backends.linux import netdevs, pci, rdma, sysfs
from backends.linux.host_uses import manages_nvswitches
from backends.linux.pci import Function
from backends.linux.rdma import Adapter, Hca

_NVIDIA: Final = "15b3"  # its Ethernet controllers are adapters, too
_NETWORK: Final = "02"  # PCI classes: a network controller,
_INFINIBAND: Final = "0207"  # and one for InfiniBand
_RDMA_MODULES: Final = {"mlx4_core": "mlx4_ib", "mlx5_core": "mlx5_ib"}  # drivers/infiniband/hw

_NVSWITCHES: Final = "nvswitches"
_NAMING: Final = frozenset({"manages", "address", "hca", "node_guid", "dev", "port", "subsystem_device"})
"""Who selects an adapter by one of these means this very one."""

ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    **pci.ATTRIBUTES,
    "function": one_of("physical", "virtual", "subfunction"),
    "manages": one_of(_NVSWITCHES),
    "hca": TEXT,
    "away": TEXT,
    "dev": TEXT,
    "pool": TEXT,
    "port": Attribute("an adapter and its port, as in 'mlx5_0:1'", ".+:[0-9]+"),
    "link_layer": one_of("InfiniBand", "Ethernet", "unknown"),
    "state": one_of(*(state.name for state in State), "unknown"),
    "rate": Attribute("a number of Gb/s, as in '400'", "[0-9]+([.][0-9])?|unknown"),
    "node_guid": Attribute("a GUID, as in '0c42:a103:0065:1a5e'", "([0-9a-f]{4}:){3}[0-9a-f]{4}"),
    **dict.fromkeys(("board_id", "fw_ver", "hca_type", "ifname", "sfnum"), TEXT),
}
"""Those of an adapter, and of a pool of them."""

_MANAGEMENT: Final = (
    "it leads to the NVSwitches between the GPUs, not to a network, and Fabric Manager needs it; it is offered where the "
    f'first resource that selects it says manages = "{_NVSWITCHES}", its address or its hca'
)

_Attributes = dict[str, tuple[str, ...]]


def function_of(host: Host, adapter: Adapter) -> Function | None:
    """The PCI function that the adapter is, or is on."""
    return pci.read(host, adapter.address) if adapter.address else None


def device(
    host: Host,
    adapter: Adapter,
    hcas: Sequence[Hca],
    function: Function | None,
    states: Sequence[PortState],
    resources: Iterable[InfiniBandResource],
) -> Device:
    """The adapter as a device; `resources` are all of the backend."""
    attributes = _attributes(adapter, hcas, function, states)
    is_management = function is not None and adapter.subfunction is None and manages_nvswitches(host, function)
    if is_management:
        attributes["manages"] = (_NVSWITCHES,)
    if adapter.away:
        attributes = assumed(attributes, UNSEEN_WHEN_AWAY, resources)
    key, owned, depends = _names(adapter, function)
    node_paths = [node.path for node in adapter.nodes]
    if host.local(rdma.RDMA_CM).is_char_device():
        node_paths.append(rdma.RDMA_CM)
    found = Device(
        key=key,
        unit=adapter.place,
        hardware=owned,
        depends=depends,
        identity=_identity(adapter, hcas, function),
        bindings=function.bindings(*owned) if function and adapter.subfunction is None else {},
        nodes=tuple(Node(path, path.text, "rw") for path in node_paths),
        numa_node=function.numa_node if function else None,
        ancestry=_ancestry(adapter, function),
        attributes=attributes,
    )
    return (
        replace(found, nodes=(), unusable=_MANAGEMENT, by_design=True)
        if is_management and not _is_meant(found, resources)
        else found
    )


def _is_meant(device: Device, resources: Iterable[InfiniBandResource]) -> bool:
    """Whether the first resource that selects the adapter names it."""
    taker = next((it for it in resources if it.refuses(device) is None), None)
    tables = taker.spec.select if taker else ()
    return any(not _NAMING.isdisjoint(table) and mismatch(table, device.attributes) is None for table in tables)


def adapter_hardware(device: Device) -> str:
    """The name of the adapter as hardware; that of its PCI function is another."""
    return next(name for name in sorted(device.hardware, reverse=True) if name.startswith("rdma:"))


def bare(host: Host, function: Function) -> Device:
    """A function that is likely to be an adapter, but has no driver that makes it one, or is a port of another adapter."""
    if bond := _bonded(host, function):
        why = f"its port belongs to {bond}, the RDMA device of all ports of its bond"
    elif function.driver is None:
        why = "it has no driver"
    elif function.driver.startswith("vfio"):
        why = f"it is bound to {function.driver}, for virtual machines"
    else:
        module = _RDMA_MODULES.get(function.driver, "the driver's module for RDMA")
        why = f"its driver {function.driver} has made no RDMA device; is {module} loaded?"
    # the adapter's own identity cannot be told now
    return replace(function.as_device(), identity="", unusable=why, by_design=bool(bond))


def _bonded(host: Host, function: Function) -> str:
    """The RDMA device that has this function's port, too (RoCE LAG); empty if there is none.

    Once the interfaces of a card are in one bond, mlx5 has one RDMA device for all of them, `mlx5_bond_0`, on the first
    function of the card (mlx5_do_bond in drivers/net/ethernet/mellanox/mlx5/core/lag/lag.c). udev may rename it.
    """
    own, _, _ = function.address.rpartition(".")
    for ifname in netdevs.names(host, function.path):
        for other in netdevs.bonded(host, ifname):
            interface = sysfs.device(host, netdevs.CLASS / other)
            at = interface.parent.parent if interface else function.path
            if at != function.path and at.name.rpartition(".")[0] == own:
                for hca in sysfs.names(host, at / "infiniband"):
                    return hca
    return ""


def is_likely(kind: str, vendor: str) -> bool:
    """Whether a function of this class and vendor is an adapter, if it has its driver."""
    return kind.startswith(_INFINIBAND) or (kind.startswith(_NETWORK) and vendor == _NVIDIA)


def _names(adapter: Adapter, function: Function | None) -> tuple[str, frozenset[str], frozenset[str]]:
    """Key, hardware, and what it depends on."""
    if adapter.address is None:
        return adapter.place, frozenset((f"rdma:{adapter.place}",)), frozenset()
    parent = f"pci:{adapter.address}"
    if adapter.subfunction is not None:
        number = adapter.subfunction
        key = f"{adapter.address}-{'sf' if number.isdecimal() else ''}{number}"
        return key, frozenset((f"rdma:{key}",)), frozenset((parent,))
    physical = function.physical if function else None
    depends = frozenset((f"pci:{physical}",)) if physical else frozenset[str]()
    return adapter.address, frozenset((parent, f"rdma:{adapter.address}")), depends


def _identity(adapter: Adapter, hcas: Sequence[Hca], function: Function | None) -> str:
    """The GUID; only the model where a pod can give the adapter another GUID; "" if it cannot be seen."""
    if function is not None and (function.physical is not None or adapter.subfunction is not None):
        return function.ids
    return "" if adapter.away or not hcas else hcas[0].node_guid


def _ancestry(adapter: Adapter, function: Function | None) -> tuple[str, ...]:
    if function is None:
        return ()
    return function.ancestry if adapter.subfunction is None else (*function.ancestry, function.address)


def _attributes(
    adapter: Adapter, hcas: Sequence[Hca], function: Function | None, states: Sequence[PortState]
) -> _Attributes:
    """What selectors match; `port`, `link_layer`, `state` and `rate` go together, one of each for a port."""
    ports = [port for hca in hcas for port in hca.ports]
    found: Mapping[str, Iterable[str]] = {
        "hca": adapter.names,
        "away": adapter.away,
        "dev": (node.number or "unknown" for node in adapter.nodes),
        "port": (f"{port.hca}:{port.number}" for port in ports),
        "link_layer": (port.link_layer or "unknown" for port in ports),
        "state": (state.state.name if state.state is not None else "unknown" for state in states),
        "rate": ("unknown" if state.rate is None else f"{state.rate / 10:g}" for state in states),
        "node_guid": (hca.node_guid for hca in hcas if hca.node_guid),
        "board_id": (hca.board_id for hca in hcas if hca.board_id),
        "fw_ver": (hca.fw_ver for hca in hcas if hca.fw_ver),
        "hca_type": (hca.hca_type for hca in hcas if hca.hca_type),
        "ifname": adapter.netdevs,
    }
    told = {name: values for name, listed in found.items() if (values := tuple(listed))}
    return {**dict(_of_function(adapter, function)), **told}


def _of_function(adapter: Adapter, function: Function | None) -> Iterator[tuple[str, tuple[str, ...]]]:
    if function is None:
        return
    if adapter.subfunction is None:
        yield from function.attributes().items()
        return
    yield from function.subfunction_attributes().items()
    yield "function", ("subfunction",)
    yield "physical", (function.address,)
    yield "sfnum", (adapter.subfunction,)


# --- pools ---


POOL: Final = "pool:"


def pool_unit(resource: InfiniBandResource) -> str:
    """The name of the resource's pool as a unit."""
    return f"{POOL}{resource.name}"


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
    hardware = frozenset({pool_unit(resource)}) if options.overlap else adapters
    numa_nodes = {member.numa_node for member in members}
    return Device(
        key="pool",
        unit=pool_unit(resource),
        resource=resource.name,
        hardware=hardware,
        parts=tuple(member.hardware for member in members),
        depends=adapters.union(*(member.depends for member in members)) - hardware,
        nodes=ContainerEdits.of(Grant(member.key, member) for member in members).nodes,
        numa_node=numa_nodes.pop() if options.topology and len(numa_nodes) == 1 else None,
        attributes=_pool_attributes(resource, members),
    )


def _pool_attributes(resource: InfiniBandResource, members: Sequence[Device]) -> Mapping[str, tuple[str, ...]]:
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
