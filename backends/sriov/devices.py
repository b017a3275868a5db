"""Makes a device of each network function, subfunction or accelerator, for the resources that select it and whose options it meets.

A subfunction is a device of the auxiliary bus that a driver makes of a part of its PCI function.
Files: Documentation/networking/devlink/devlink-port.rst ("Subfunction"), Documentation/driver-api/auxiliary_bus.rst.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from backends.base import NUMBER, NUMBERS, TEXT, Attribute, Device, Discovery, Host, HostPath, Node, Problem, one_of
from backends.errors import several
from backends.interface.written import assumed
from backends.linux import host_uses, netdevs, netlink, pci, rdma, sysfs
from backends.sriov import container_edits, creation
from backends.sriov.container_edits import VdpaDevice
from backends.sriov.options import UNSEEN_WHEN_AWAY, DeviceType, SriovResource

_OF_ONE: Final = frozenset({"address", "function", "ifname"})
"""Attributes by which a card is told from its virtual functions."""


def find(host: Host, resources: Sequence[SriovResource], unit: str) -> Discovery:
    """The devices of a function or subfunction, one for each resource that could have it."""
    look = _function if pci.ADDRESS.fullmatch(unit) else _subfunction
    seen = look(host, resources, unit)
    if seen is None:
        return Discovery()
    if (asked := creation.asked(resources, seen.device)) is not None:
        resource, count = asked
        if not seen.virtual:
            return Discovery((creation.stand_in(seen.device, resource, count),), problems=seen.problems)
        if seen.virtual != count:
            problem = Problem(unit, creation.different(unit, seen.virtual, count))
            seen = replace(seen, problems=(*seen.problems, problem))
    mine = [it for it in resources if it.spec.options.device_type == seen.device_type]
    if not mine:
        return Discovery()  # an event named it; it is no unit
    if not seen.needed:
        return Discovery(_taken(host, seen, mine), problems=seen.problems, beside=(seen.device,))
    needed = replace(seen.device, unusable=seen.needed, by_design=True)
    devices = _left_alone(seen, needed, mine)
    return Discovery(devices, problems=seen.problems, beside=() if devices else (needed,))


def _left_alone(seen: Seen, needed: Device, resources: Sequence[SriovResource]) -> tuple[Device, ...]:
    """The device with why it is left alone, for the first resource that might take it.

    A card with virtual functions is offered as these: it is for a resource only if a selector means the card itself.
    """
    meant = (it for it in resources if it.might_take(needed) and (not seen.virtual or _OF_ONE & it.asks_for))
    return tuple(replace(needed, resource=it.configured) for it in [*meant][:1])


def _taken(host: Host, seen: Seen, resources: Sequence[SriovResource]) -> tuple[Device, ...]:
    """The device for each resource that wants it, with why it cannot offer it; a card that no resource wants is none.

    The first resource that can offer it gets it, unless a pod has it from another.
    """
    selecting = [it for it in resources if it.refuses(seen.device) is None]
    might = selecting if seen.has_driver else [it for it in resources if it.might_take(seen.device)]
    if might:
        return tuple(
            replace(seen.device, resource=it.configured, unusable=why)
            if (why := _lacks(seen, it))
            else _offered(host, seen, it)
            for it in might
        )
    is_virtual = bool(seen.device.depends)
    return (
        tuple(replace(seen.device, resource=it.configured) for it in resources) if is_virtual else ()
    )  # each says why


def _lacks(seen: Seen, resource: SriovResource) -> str:
    """What the function lacks of what the resource's options ask for; empty if nothing."""
    options = resource.spec.options
    if not seen.has_driver:
        return "it has no driver"
    if options.rdma and seen.adapter is None:
        return f"it has no RDMA device, which {resource.name} asks for (rdma)"
    if options.vdpa is not None and (seen.vdpa is None or seen.vdpa.kind != options.vdpa):
        return f"it has no vDPA device on {options.vdpa}_vdpa, which {resource.name} asks for (vdpa)"
    return ""


def _offered(host: Host, seen: Seen, taker: SriovResource) -> Device:
    """The device as a resource offers it: its nodes in the order of the sriov-network-device-plugin."""
    options = taker.spec.options
    every = list(seen.nodes)
    if options.rdma and seen.adapter is not None:
        every += container_edits.rdma_nodes(host, seen.adapter)
    if options.vhost_net:
        every += container_edits.vhost_nodes(host)
    if options.vdpa == "vhost" and seen.vdpa is not None:
        every += seen.vdpa.nodes
    numa_node = seen.device.numa_node if options.topology else None
    return replace(seen.device, resource=taker.configured, nodes=tuple(every), numa_node=numa_node)


# --- functions ---


PROFILE: Final = "ddp_profile"
_INTEL: Final = "8086"  # its cards have such profiles
_RUNNING_PROFILE: Final = "fw.app.name"  # Documentation/networking/devlink/ice.rst

ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    **pci.ATTRIBUTES,
    "function": one_of("physical", "virtual", "subfunction"),
    "acpi_index": NUMBER,
    "vf": NUMBERS,
    "sfnum": NUMBERS,
    "link_layer": one_of("Ethernet", "InfiniBand"),
    "pkey": Attribute("a partition key, as in '0x8001'", "0x[0-9a-f]{1,4}"),
    "vdpa": one_of("virtio", "vhost"),
    **dict.fromkeys(("pf", "ifname", "hca", "vdpa_device", PROFILE), TEXT),
}

_NETWORK: Final = "02"  # PCI base class
_INFINIBAND: Final = "0207"  # PCI class
_TYPES: Final[Mapping[str, DeviceType]] = {_NETWORK: "netDevice", "12": "accelerator"}
_PKEY: Final = re.compile(r"0x[0-9a-f]{1,4}", re.IGNORECASE)

Attributes = Iterator[tuple[str, tuple[str, ...]]]


class Seen(Struct, frozen=True):
    """A function or subfunction as one look found it, not yet of any resource."""

    device: Device
    device_type: DeviceType
    has_driver: bool
    needed: str = ""
    """Why the host needs it, a sentence without its subject; empty if it does not."""
    virtual: int = 0
    """How many virtual functions it has."""
    nodes: tuple[Node, ...] = ()
    """Those that its driver makes."""
    adapter: rdma.Adapter | None = None
    vdpa: VdpaDevice | None = None
    problems: tuple[Problem, ...] = ()


def device_type(kind: str) -> DeviceType | None:
    """The device type for this PCI class; None if this backend has none for it."""
    return _TYPES.get(kind[:2]) if kind else None


def link(physical: str) -> str:
    """The name of a physical function's link as hardware; devices of other backends do not depend on it."""
    return f"link:{physical}"


def _function(host: Host, resources: Sequence[SriovResource], address: str) -> Seen | None:
    """The function of that address; None if it is gone or no resource is for its class.

    Reads nothing that no resource asks for: there may be hundreds of functions.
    """
    function = pci.read(host, address)
    kind = device_type(function.kind) if function is not None else None
    mine = [resource for resource in resources if resource.spec.options.device_type == kind]
    if function is None or kind is None or not mine:
        return None
    own = _interfaces(host, function)
    vdpa = container_edits.vdpa_device(host, function) if any(it.spec.options.vdpa for it in mine) else None
    device = function.as_device()
    more = {name: values for name, values in _attributes(host, function, own, vdpa) if values}
    if function.vendor == _INTEL and any(PROFILE in resource.asks_for for resource in mine):
        more.update(_profile(host, function))
    depends = device.depends | {link(function.physical)} if function.physical else device.depends
    attributes = assumed({**device.attributes, **more}, UNSEEN_WHEN_AWAY, resources)
    device = replace(device, depends=depends, attributes=attributes)
    wants_rdma = any(it.spec.options.rdma and it.might_take(device) for it in mine)
    adapter = rdma.read(host, address) if wants_rdma else None
    if adapter is not None:
        device = replace(device, attributes={**device.attributes, "hca": adapter.names})
    return Seen(
        device,
        kind,
        function.driver is not None,
        _needed(host, function, own),
        len(function.virtual),
        tuple(container_edits.nodes_of(host, function)),
        adapter,
        vdpa,
        function.problems,
    )


def _needed(host: Host, function: pci.Function, interfaces: Sequence[str]) -> str:
    """Why the host needs the function; empty if it does not. No route leads through one that is not set up."""
    if function.virtual:
        return f"it has {several(len(function.virtual), 'virtual function')}, which would go with it"
    if number := host_uses.subfunctions(function):
        return f"it has {several(number, 'subfunction')}, which would go with it"
    if host_uses.manages_nvswitches(host, function):
        return "it leads to the NVSwitches between the GPUs, not to a network, and Fabric Manager needs it"
    is_virtual = function.physical is not None
    if not function.kind.startswith(_NETWORK):
        return ""
    if is_virtual and not any(netdevs.is_enabled(host, name) for name in interfaces):
        why = host_uses.membership(host, interfaces)
    else:
        why = host_uses.uplink(host, interfaces, sure=is_virtual)
    return f"it {why}" if why else ""


def _interfaces(host: Host, function: pci.Function) -> tuple[str, ...]:
    """Its interfaces; they are not searched for where its directory shows that there are none, or just one."""
    if len(function.net) == 1:
        return function.net
    has_any = any(name == "net" or name.startswith("virtio") for name in function.entries)
    return netdevs.names(host, function.path) if has_any else ()


def _attributes(host: Host, function: pci.Function, interfaces: Sequence[str], vdpa: VdpaDevice | None) -> Attributes:
    """What is known beside the attributes of every PCI function."""
    if "acpi_index" in function.entries and (number := sysfs.number(host, function.path / "acpi_index")) is not None:
        yield "acpi_index", (str(number),)
    above = sysfs.target(host, function.path / "physfn") if function.physical is not None else None
    yield from of_interfaces(host, interfaces, above)
    if above is not None and (number := _number(host, function, above)) is not None:
        yield "vf", (str(number),)
    if function.kind.startswith(_INFINIBAND):
        yield "pkey", tuple(_pkeys(host, function))
    if vdpa is not None:
        yield "vdpa", (vdpa.kind,)
        yield "vdpa_device", (vdpa.name,)


def of_interfaces(host: Host, own: Sequence[str], above: HostPath | None) -> Attributes:
    """The attributes that interfaces tell: a function's own ones, and those of the physical function above."""
    uplink = netdevs.uplink(host, above) if above is not None else None
    yield "ifname", tuple(own)
    yield "pf", (uplink,) if uplink else ()
    layer = next((netdevs.link_layer(host, name) for name in (*own, uplink) if name), None)
    yield "link_layer", (layer,) if layer else ()


def _profile(host: Host, function: pci.Function) -> Attributes:
    """The profile of the card's packet parser (Dynamic Device Personalization)."""
    if profile := netlink.devlink_versions(host, function.physical or function.address).get(_RUNNING_PROFILE):
        yield PROFILE, (profile,)


def _number(host: Host, function: pci.Function, above: HostPath) -> int | None:
    """The number of a virtual function within its physical one, from 0, by their addresses.

    The first is `sriov_offset` behind it, and each other `sriov_stride` further (PCI Express Base Specification,
    9.2.1.2). The links virtfn<N> tell the same, but would have to be read one by one.
    """
    offset, stride = (sysfs.number(host, above / f"sriov_{name}") for name in ("offset", "stride"))
    if offset is None or not stride:
        return None
    behind = pci.routing_id(function.address) - pci.routing_id(above.name) - offset
    return behind // stride if behind >= 0 and behind % stride == 0 else None


def _pkeys(host: Host, function: pci.Function) -> Iterator[str]:
    """The default partition key of each InfiniBand port, which is the first in the port's table."""
    for hca in function.infiniband:
        ports = function.path / "infiniband" / hca / "ports"
        for port in sysfs.names(host, ports):
            key = sysfs.attribute(host, ports / port / "pkeys/0") or ""
            if _PKEY.fullmatch(key):
                yield key.lower()


# --- subfunctions ---


_AUXILIARY: Final = HostPath("/sys/bus/auxiliary/devices")
SUBFUNCTION: Final = re.compile(r"[\w-]+\.sf\.[0-9]+")
"""`mlx5_core.sf.2`: the driver, the kind of device, and a number of the kernel."""


def subfunctions(host: Host) -> list[str]:
    """The names of all subfunctions.

    Raises:
        OSError: they cannot be listed.
    """
    return [name for name in sysfs.entries(host, _AUXILIARY) if SUBFUNCTION.fullmatch(name)]


def _subfunction(host: Host, resources: Sequence[SriovResource], name: str) -> Seen | None:
    """The subfunction of that name; None if it is gone, or on no PCI function."""
    path = sysfs.device(host, _AUXILIARY / name) if SUBFUNCTION.fullmatch(name) else None
    function = pci.read(host, path.parent.name) if path is not None else None
    if path is None or function is None:
        return None
    wants_rdma = any(resource.spec.options.rdma for resource in resources)
    adapter = rdma.read(host, f"{function.address}/{name}") if wants_rdma else None
    number = sysfs.number(host, path / "sfnum")
    called = name if number is None else f"sf{number}"
    attributes = {
        key: values for key, values in _subfunction_attributes(host, path, function, number, adapter) if values
    }
    above = function.physical or function.address
    device = Device(
        key=name,
        unit=name,
        hardware=frozenset((f"aux:{name}", f"rdma:{function.address}-{called}")),  # as the backend infiniband calls it
        depends=frozenset((function.hardware, f"pci:{above}", link(above))),
        identity=f"{function.ids} {called}",
        place=frozenset((f"sf:{function.address}-{called}",)),  # its name is the next one's after a boot
        numa_node=function.numa_node,
        ancestry=(*function.ancestry, function.address),
        attributes=assumed(attributes, UNSEEN_WHEN_AWAY, resources),
    )
    why = host_uses.uplink(host, netdevs.names(host, path), sure=True)
    has_driver = sysfs.linked_name(host, path / "driver") is not None
    return Seen(
        device, "auxNetDevice", has_driver, f"it {why}" if why else "", adapter=adapter, problems=function.problems
    )


def _subfunction_attributes(
    host: Host, path: HostPath, function: pci.Function, number: int | None, adapter: rdma.Adapter | None
) -> Attributes:
    yield from function.subfunction_attributes().items()
    yield "function", ("subfunction",)
    yield "physical", (function.physical or function.address,)
    yield "sfnum", () if number is None else (str(number),)
    above = sysfs.target(host, function.path / "physfn") if function.physical else function.path
    yield from of_interfaces(host, netdevs.names(host, path), above)
    if adapter is not None:
        yield "hca", adapter.names
