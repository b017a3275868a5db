"""The backend `sriov`: its units are network functions, subfunctions and accelerators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

from msgspec.structs import replace

from backends.base import (
    ALL,
    All,
    AllocationRefused,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    Host,
    HostPath,
    Known,
    LinkChange,
    PathChange,
    Record,
    Released,
    Signal,
    Uevent,
    Verdict,
    Watches,
)
from backends.linux import device_info, host_uses, iommu, netdevs, pci, pci_health, rdma, sysfs
from backends.linux.kernel import Kernel
from backends.linux.nodes import missing
from backends.sriov import container_edits, creation, devices
from backends.sriov.creation import Creator
from backends.sriov.devices import link
from backends.sriov.options import SriovOptions, SriovResource, complaints

_SUBSYSTEMS: Final = frozenset({"pci", "auxiliary", "net", "infiniband", "infiniband_verbs", "uio", "vdpa"})
_SHARED: Final = frozenset({*container_edits.VHOST, rdma.RDMA_CM})


class Sriov(Backend[SriovOptions]):
    """Hands out network functions (virtual, physical and subfunctions) and accelerators.

    A unit is the PCI address of a function, or the name of a subfunction on the auxiliary bus.
    """

    options_type: ClassVar = SriovOptions
    attributes: ClassVar = devices.ATTRIBUTES
    company: ClassVar = frozenset({"gpu"})
    complaints: ClassVar = staticmethod(complaints)

    def __init__(self, host: Host, resources: Sequence[SriovResource], kernel: Kernel | None = None) -> None:
        super().__init__(host, resources)
        self._creator = Creator(host, kernel or Kernel(host))

    # --- what is there ---

    def units(self) -> Iterable[str]:
        """Every function of a class that a resource wants, and every subfunction."""
        wanted = {resource.spec.options.device_type for resource in self.resources}
        for address, kind, _ in pci.announced(self.host):
            if devices.device_type(kind) in wanted:
                yield address
        if "auxNetDevice" in wanted:
            yield from devices.subfunctions(self.host)

    def discover(self, unit: str) -> Discovery:
        """The device of the function, for each resource that can take it."""
        return devices.find(self.host, self.resources, unit)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """Events of functions, interfaces, links, and nodes of all kinds."""
        return Watches(
            subsystems=_SUBSYSTEMS,
            directories=frozenset({container_edits.DEV, container_edits.DEV / "net", iommu.NODES, rdma.NODES}),
            facts=frozenset({pci_health.FACT}),
            links=True,
        )

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """The function that an event is about, and what depends on it; all functions for a node that all share."""
        if isinstance(hint, PathChange):
            return ALL if hint.path in _SHARED else _with_node(hint.path, known)
        if isinstance(hint, LinkChange):
            return netdevs.having(hint.name, known, ("pf", "ifname"))
        assert isinstance(hint, Uevent)
        if hint.subsystem == "auxiliary":
            return (hint.name,) if devices.SUBFUNCTION.fullmatch(hint.name) else ()
        found = pci.affected(hint, known) | pci.undivided(hint, known)
        if hint.subsystem != "pci":
            found &= known.keys()  # functions of other classes have interfaces, too
        return found | {unit for address in found for unit in known.minding(f"pci:{address}")}

    # --- how it is ---

    def probe(self, device: Device) -> Iterable[Signal]:
        """The health of its nodes, of the function, and of its physical function with its link."""
        if device.unusable or device.resource is None:
            return ()
        if creation.is_stand_in(device):
            return (creation.signal(device),)
        return _device_signals(self.host, device, self._options_of(device))

    def _options_of(self, device: Device) -> SriovOptions:
        taker = next((it for it in self.resources if it.configured == device.resource), None)
        return taker.spec.options if taker is not None else SriovOptions()

    def signals(self, record: Record) -> Iterable[Signal]:
        """PCI error recoveries, of any function."""
        return pci_health.recovery_signals(record)

    # --- making virtual functions ---

    def adopts(self, resource: SriovResource) -> bool:
        """Only for resources with `create`."""
        return bool(resource.spec.options.create)

    def adopt(self, resource: SriovResource, device: Device) -> bool:
        """Create the virtual functions that the device stands for."""
        if not creation.is_stand_in(device):
            return False
        count = len(device.attributes["vf"])
        self._creator.create(device.key, count, autoprobe=resource.spec.options.autoprobe)
        return True

    # --- handing out ---

    def prefers(self, resource: SriovResource) -> bool:  # noqa: ARG002  # an interface's
        """Always: a pod's network should be near its GPUs."""
        return True

    def edits(self, resource: SriovResource, grants: Sequence[Grant]) -> ContainerEdits:
        """The nodes, each once, and the two variables."""
        return replace(ContainerEdits.of(grants), env=container_edits.variables(resource, grants))

    def claim(self, resource: SriovResource, grants: Sequence[Grant]) -> None:
        """Check again whether the host needs the device, and write the file that tells CNI plugins about it.

        Raises:
            AllocationRefused: the host needs it by now for its network, or the file cannot be written.
        """
        are_interfaces = any(it.device.attributes.get("ifname") for it in grants)
        routes = netdevs.routes(self.host) if are_interfaces else None
        for grant in grants:
            device = grant.device
            if creation.is_stand_in(device):
                raise AllocationRefused(
                    f"The virtual functions of {device.key} are not made yet. Create the pod again."
                )
            if why := host_uses.uplink(self.host, device.attributes.get("ifname", ()), routes, sure=True):
                raise AllocationRefused(f"{grant.id} of {resource.name} {why}. Create the pod again.")
            if resource.spec.options.device_info and resource.spec.options.device_type == "netDevice":
                device_info.write(self.host, resource.name, grant.id, _told(resource, device))

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:  # noqa: ARG002
        """Remove the files that `claim` wrote."""
        device_info.remove(self.host, ended)


def _told(resource: SriovResource, device: Device) -> device_info.Info:
    """What the file for CNI plugins says of a device."""
    options, said = resource.spec.options, device.attributes
    if options.vdpa is None:
        return device_info.pci(device.key, said.get("hca", ()) if options.rdma else ())
    path = next((node.path.text for node in device.nodes if node.path.name.startswith("vhost-vdpa-")), "")
    return device_info.vdpa(device.key, said["vdpa_device"][0], options.vdpa, path)


def _with_node(path: HostPath, known: Known) -> list[str]:
    """The units with a device that has this node."""
    return [
        unit for unit, devices in known.items() if any(node.path == path for device in devices for node in device.nodes)
    ]


# --- how a device is ---


_ETHERNET: Final = "0200"


def _device_signals(host: Host, device: Device, options: SriovOptions) -> Iterator[Signal]:
    """What is wrong with the device, and with the physical function that it is a part of."""
    hardware = min(device.hardware)
    yield from missing(host, hardware, device.nodes)
    if options.vhost_net and not set(container_edits.VHOST) <= {node.path for node in device.nodes}:
        why = f"{' or '.join(map(str, container_edits.VHOST))} is missing, and so both are left out: load vhost_net and tun"
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
    """Whether an Ethernet card has no interface here, though its driver makes one: the default route may use it."""
    said = device.attributes
    is_ethernet = any(kind.startswith(_ETHERNET) for kind in said.get("class", ()))
    on_vfio = any(it.path.parent == iommu.NODES for it in device.nodes)
    makes_none = on_vfio or not host_uses.MAKE_NO_INTERFACE.isdisjoint(said.get("driver", ()))
    return is_ethernet and not makes_none and not netdevs.names(host, pci.FUNCTIONS / device.key)


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
