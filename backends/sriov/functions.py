"""Reads a network function or accelerator: its attributes, its interfaces, and whether the host needs it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from backends.base import NUMBER, NUMBERS, TEXT, Attribute, Device, Host, HostPath, Node, Problem, one_of
from backends.interface.written import assumed
from backends.linux import host_uses, netdevs, netlink, pci, rdma, sysfs
from backends.sriov import nodes
from backends.sriov.nodes import VdpaDevice
from backends.sriov.options import UNSEEN_WHEN_AWAY, DeviceType, SriovResource

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


def look(host: Host, resources: Sequence[SriovResource], address: str) -> Seen | None:
    """The function of that address; None if it is gone or no resource is for its class.

    Reads nothing that no resource asks for: there may be hundreds of functions.
    """
    function = pci.read(host, address)
    kind = device_type(function.kind) if function is not None else None
    mine = [resource for resource in resources if resource.spec.options.device_type == kind]
    if function is None or kind is None or not mine:
        return None
    own = _interfaces(host, function)
    vdpa = nodes.vdpa(host, function) if any(it.spec.options.vdpa for it in mine) else None
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
        tuple(nodes.of_function(host, function)),
        adapter,
        vdpa,
        function.problems,
    )


def _needed(host: Host, function: pci.Function, interfaces: Sequence[str]) -> str:
    """Why the host needs the function; empty if it does not. No route leads through one that is not set up."""
    if function.virtual:
        return f"it has {len(function.virtual)} virtual functions, which would go with it"
    if number := host_uses.subfunctions(function):
        return f"it has {number} subfunctions, which would go with it"
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
