"""Checks the health of a function: nodes, PCI state, IOMMU group, and the link of the physical function.

The link of a virtual function's own interface does not count: it is down until a CNI plugin sets it up in the pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backends.base import Device, Host, Signal, Verdict
from backends.linux import host_uses, iommu, netdevs, pci, pci_health, sysfs
from backends.linux.nodes import missing
from backends.sriov import nodes
from backends.sriov.functions import link
from backends.sriov.options import SriovOptions

_ETHERNET: Final = "0200"


def signals(host: Host, device: Device, options: SriovOptions) -> Iterator[Signal]:
    """What is wrong with the device, and with the physical function that it is a part of."""
    hardware = min(device.hardware)
    yield from missing(host, hardware, device.nodes)
    if options.vhost_net and not set(nodes.VHOST) <= {node.path for node in device.nodes}:
        why = f"{' or '.join(map(str, nodes.VHOST))} is missing, and so both are left out: load vhost_net and tun"
        yield Signal(hardware, "vhost-missing", Verdict.DEGRADED, why)
    yield from _group(host, device, hardware)
    if device.attributes.get("function") == ("physical",) and _is_away(host, device):
        why = f"the interface of {device.key} cannot be seen: another network namespace has it, or Fairlead is in one"
        yield Signal(hardware, "in-another-namespace", Verdict.NOW, why, unless_held=True)
    enabled = [name for name in device.attributes.get("ifname", ()) if netdevs.is_enabled(host, name)]
    for use in host_uses.addresses(host, enabled):
        yield Signal(hardware, "has-address", Verdict.INFO, f"{device.key} {use}, which it would lose to a pod")
    physical = device.attributes.get("physical", ())
    for address in device.attributes.get("address", ()):
        yield from pci_health.signals(host, address, has_link=not physical)
    for address in physical:
        yield from pci_health.signals(host, address)
        for name in device.attributes.get("pf", ()):
            yield from _link(host, address, name, options)


def _is_away(host: Host, device: Device) -> bool:
    """Is the interface of a card elsewhere, although its driver makes one? The default route may lead through it."""
    said = device.attributes
    is_ethernet = any(kind.startswith(_ETHERNET) for kind in said.get("class", ()))
    in_user_space = any(it.path.parent == iommu.NODES or it.path.name.startswith("uio") for it in device.nodes)
    return is_ethernet and not in_user_space and not netdevs.names(host, pci.FUNCTIONS / device.key)


def _group(host: Host, device: Device, hardware: str) -> Iterator[Signal]:
    """On a vfio driver it can be opened only if the whole IOMMU group can be handed out."""
    if all(node.path.parent != iommu.NODES for node in device.nodes):
        return
    number = next(iter(device.attributes.get("iommu_group", ())), "")
    if sysfs.names(host, iommu.GROUPS / number / "devices") == [device.key]:
        return  # it is alone, as virtual functions are
    group = iommu.read(host, number)
    for member in group.members if group is not None else ():
        if not member.is_viable:
            why = f"{group.name if group else ''} cannot be opened while {member.name}, in it, is on {member.driver}"
            yield Signal(hardware, "group-not-viable", Verdict.NOW, why)


def _link(host: Host, physical: str, name: str, options: SriovOptions) -> Iterator[Signal]:
    """The physical function's link. One that is not set up may be so on purpose: only some drivers need it."""
    if (state := netdevs.down(host, name)) is None:
        return
    if netdevs.is_enabled(host, name):
        why = f"the link of {name}, the physical function {physical}, is {state}"
        yield Signal(link(physical), "link-down", Verdict.DELAYED, why, after=float(options.down_after))
    else:
        why = f"{name}, the interface of the physical function {physical}, is not set up (ip link set {name} up)"
        yield Signal(link(physical), "link-disabled", Verdict.DEGRADED, why)
