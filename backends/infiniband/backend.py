"""The backend `infiniband`: its units are places with adapters, and the pools of resources that share all of theirs.

A glance reads the ports of an adapter every few seconds, since the kernel sends no event of them. The rest is read each half
minute, or when a glance has changed; so paths are plain texts there, and no file is read twice.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

from msgspec.structs import replace

from backends.base import (
    ALL,
    All,
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
    Problem,
    Record,
    Signal,
    Uevent,
    Verdict,
    Watches,
)
from backends.errors import reason_of
from backends.infiniband import devices, ports
from backends.infiniband.devices import POOL
from backends.infiniband.options import InfiniBandOptions, InfiniBandResource, complaints
from backends.linux import pci, pci_health, rdma
from backends.linux.rdma import Hca, Port

_DEFAULTS: Final = InfiniBandOptions()

_CLASSES: Final = frozenset({"infiniband", "infiniband_verbs", "infiniband_mad"})

_SUBSYSTEMS: Final = _CLASSES | {"pci", "net", "misc"}
"""rdma_cm is a device of misc."""


class InfiniBand(Backend[InfiniBandOptions]):
    """Hands out RDMA adapters."""

    options_type: ClassVar = InfiniBandOptions
    attributes: ClassVar = devices.ATTRIBUTES
    company: ClassVar = frozenset({"gpu"})
    complaints: ClassVar = staticmethod(complaints)

    @classmethod
    def tokens(cls, resource: InfiniBandResource) -> Iterable[tuple[tuple[str | int, ...], int]]:
        """As many as `shared` says."""
        yield ("shared",), resource.spec.options.shared or 1

    @classmethod
    def fixed_ids(cls, resource: InfiniBandResource) -> Iterable[str]:
        """The tokens of a shared resource."""
        return _tokens(resource)

    # --- what is there ---

    def units(self) -> Iterable[str]:
        """The places, the functions that are likely to be adapters, and the pools."""
        likely = (address for address, kind, vendor in pci.announced(self.host) if devices.is_likely(kind, vendor))
        shared = (
            devices.pool_unit(resource) for resource in self.resources if resource.spec.options.shared is not None
        )
        return dict.fromkeys((*rdma.places(self.host), *likely, *shared))

    def discover(self, unit: str) -> Discovery:
        """The adapter at a place, or the pool of a resource."""
        if unit.startswith(devices.POOL):
            return self._pool(self.resource(unit.removeprefix(devices.POOL)))
        adapter = rdma.read(self.host, unit)
        if adapter is None:
            return self._without_adapter(unit)
        function = devices.function_of(self.host, adapter)
        hcas = rdma.hcas(self.host, adapter)
        states = [ports.read(self.host, port) for hca in hcas for port in hca.ports]
        device = devices.device(self.host, adapter, hcas, function, states, self.resources)
        problems = (*adapter.problems, *(function.problems if function else ()), *self._missing_ports(hcas, device))
        return Discovery((device,), problems=problems)

    def _without_adapter(self, unit: str) -> Discovery:
        function = pci.read(self.host, unit) if pci.ADDRESS.fullmatch(unit) else None
        if function is None or not devices.is_likely(function.kind, function.vendor):
            return Discovery()
        return Discovery((devices.bare(self.host, function),), problems=function.problems)

    def _missing_ports(self, hcas: Iterable[Hca], device: Device) -> Iterator[Problem]:
        """A problem for each port that the resource asks for by number and the adapter does not have."""
        if (taker := self._taker(device)) is None:
            return
        for hca in hcas:
            for number in ports.missing((port.number for port in hca.ports), taker.spec.options):
                yield Problem(device.key, f"{hca.name} has no port {number}, which {taker.name} asks for", taker.name)

    def _pool(self, resource: InfiniBandResource) -> Discovery:
        members, problems, kept = [], [], dict[str, str]()
        for place in rdma.places(self.host):
            try:
                adapter = rdma.read(self.host, place)
            except OSError as error:
                why = f"{place} cannot be read, and is in no pool meanwhile: {reason_of(error)}"
                problems.append(Problem(place, why))
                continue
            if adapter is not None:
                function = devices.function_of(self.host, adapter)
                hcas = rdma.hcas(self.host, adapter)
                device = devices.device(self.host, adapter, hcas, function, (), self.resources)
                if device.unusable or resource.refuses(device) is not None:
                    continue
                if (other := devices.kept_from(resource, device, self.resources)) is None:
                    members.append(device)
                else:
                    kept[device.key] = other
        if kept and not members:
            by = " and ".join(f"{key} to {other}" for key, other in kept.items())
            why = (
                f"what it selects belongs to resources above it: {by}. Pools that all say overlap = true share adapters"
            )
            problems.append(Problem(resource.name, f"{resource.name} has no adapters and no tokens, because {why}"))
        if members and rdma.is_exclusive(self.host):
            why = "RDMA devices are in one network namespace at a time here: only pods in the host's network can use it"
            problems.append(Problem(resource.name, f"{resource.name} is shared, but {why}"))
        return Discovery((devices.pool(resource, members),) if members else (), problems=tuple(problems))

    # --- how it is ---

    def probe(self, device: Device) -> Iterable[Signal]:
        """The health of an adapter; a pool has none of its own."""
        if device.resource is not None or device.unusable:
            return ()
        taker = self._taker(device)
        return _adapter_signals(self.host, device, taker.spec.options if taker else _DEFAULTS)

    def glance(self, device: Device) -> object:
        """The state of the ports of an adapter; a pool has none of its own."""
        if device.resource is not None or device.unusable:
            return ()
        virtual_ports = any(resource.spec.options.virtual_ports for resource in self.resources)
        if virtual_ports or _has_ports(device):
            return tuple(ports.glance(self.host, port) for port in _ports(device))
        return tuple(_is_seen(self.host, name) for name in device.attributes["hca"])

    def _taker(self, device: Device) -> InfiniBandResource | None:
        """The first resource that selects the adapter: its options decide about health."""
        return next((resource for resource in self.resources if resource.refuses(device) is None), None)

    def signals(self, record: Record) -> Iterable[Signal]:
        """PCI error recoveries, of any function: the event does not say whether it is an adapter."""
        return pci_health.recovery_signals(record)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # the same whatever there is
        """Events of adapters, their functions, nodes and interfaces; and a glance at the ports every few seconds."""
        return Watches(
            subsystems=_SUBSYSTEMS,
            directories=frozenset((rdma.NODES,)),
            facts=frozenset((pci_health.FACT,)),
            links=True,
            poll=min((float(resource.spec.options.poll) for resource in self.resources), default=None),
        )

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """The places that an event is about, and with them the pools."""
        if isinstance(hint, LinkChange):
            return [unit for unit, device in _adapters(known) if hint.name in device.attributes.get("ifname", ())]
        if isinstance(hint, PathChange):
            return _with_node(hint.path, known)
        if hint.subsystem == "misc":
            return ALL if hint.name == "rdma_cm" else ()
        if hint.subsystem == "pci":
            return [unit for address in pci.affected(hint, known) for unit in (address, *_at(address, known))]
        places = list(_places(hint, known))
        return [*places, *(unit for unit in known if unit.startswith(POOL))] if places else ()

    # --- handing out ---

    def ids(self, resource: InfiniBandResource, device: Device) -> Sequence[str]:
        """Those of a pool's tokens; the adapters in it have no IDs."""
        if resource.spec.options.shared is None:
            return super().ids(resource, device)
        return _tokens(resource) if device.resource is not None else ()

    def prefers(self, resource: InfiniBandResource) -> bool:
        """Only where a pod gets one adapter, which should be near its GPU; the tokens of a pool are all equal."""
        return resource.spec.options.shared is None

    def edits(self, resource: InfiniBandResource, grants: Sequence[Grant]) -> ContainerEdits:
        """The nodes of each adapter, each once, and one rdma_cm after them."""
        options = resource.spec.options
        permissions = options.permissions or ("rw" if options.shared is None else "rwm")
        left_out = {kind for kind, wanted in (("issm", options.issm), ("umad", options.umad)) if not wanted}
        nodes = [
            node for node in ContainerEdits.of(grants).nodes if node.path.name.rstrip("0123456789") not in left_out
        ]
        last = [node for node in nodes if node.path == rdma.RDMA_CM]
        every = [*(node for node in nodes if node.path != rdma.RDMA_CM), *last]
        return ContainerEdits(nodes=tuple(replace(node, permissions=permissions) for node in every))


def _tokens(resource: InfiniBandResource) -> tuple[str, ...]:
    """The IDs of a pool's tokens.

    k8s-rdma-shared-dev-plugin has bare numbers, those of one pool in each: kubelets before kubernetes 140323 tell the health
    of one to pods that have the other (kubelet contract: A11.8). A pod that holds a number keeps it: it is a former ID.
    """
    return tuple(f"{resource.name}::{n}" for n in range(resource.spec.options.shared or 0))


# --- the places that an event is about, quickly where it is about none ---


def _places(event: Uevent, known: Known) -> Iterator[str]:
    if event.subsystem in _CLASSES:
        yield (place := rdma.place_of(event.devpath))
        yield from _other_ports(place, known)
        if before := event.properties.get("DEVPATH_OLD"):
            yield rdma.place_of(before)
        if event.subsystem != "infiniband" and pci.address_in(event.devpath) is None:
            # a node without hardware: only a file tells its adapter
            yield from (
                unit for unit, devices in known.items() for device in devices if "function" not in device.attributes
            )
    elif event.subsystem == "net" and (on := pci.address_in(event.devpath)) is not None:
        yield from _at(on, known)


def _other_ports(place: str, known: Known) -> Iterator[str]:
    """The functions of the same card without an adapter: it may have begun or ended to be theirs, too (RoCE LAG)."""
    card = place.partition("/")[0].rpartition(".")[0]
    for unit, found in known.items():
        if card and unit != place and unit.rpartition(".")[0] == card and any(device.unusable for device in found):
            yield unit


def _at(address: str, known: Known) -> Iterable[str]:
    """The places at a PCI function, and those that depend on it."""
    return (unit for unit in known.minding(f"pci:{address}") if not unit.startswith(POOL))


def _with_node(path: HostPath, known: Known) -> list[str] | All:
    if path in (rdma.NODES, rdma.RDMA_CM):
        return ALL
    return [unit for unit, device in _adapters(known) if any(node.path == path for node in device.nodes)]


def _adapters(known: Known) -> Iterator[tuple[str, Device]]:
    return ((unit, device) for unit, devices in known.items() for device in devices if device.resource is None)


# --- how an adapter is ---


def _adapter_signals(host: Host, device: Device, options: InfiniBandOptions) -> Iterator[Signal]:
    """What is wrong with the adapter now."""
    hardware, said = devices.adapter_hardware(device), device.attributes
    yield from _node_signals(host, hardware, device)
    if lost := [name for name in said["hca"] if not _is_seen(host, name)]:
        yield from _lost(host, hardware, device, lost)
    if said.get("function") == ("physical",):
        yield from pci_health.signals(host, said["address"][0])
    if options.virtual_ports or _has_ports(device):
        states = [ports.read(host, port, options.counters) for port in _ports(device) if port.hca not in lost]
        yield from ports.signals(hardware, states, options)


def _has_ports(device: Device) -> bool:
    """Whether an adapter's ports count for its health. Those of a virtual function may be down on purpose."""
    return device.attributes.get("function", ("physical",)) == ("physical",)


def _is_seen(host: Host, hca: str) -> bool:
    return os.path.isdir(f"{host.sys}/class/infiniband/{hca}")  # noqa: PTH112  # a Path costs more than the question


def _ports(device: Device) -> Iterator[Port]:
    said = device.attributes
    for name, link_layer in zip(said.get("port", ()), said.get("link_layer", ()), strict=False):
        hca, _, number = name.rpartition(":")
        yield Port(hca, int(number), link_layer)


def _node_signals(host: Host, hardware: str, device: Device) -> Iterator[Signal]:
    """Signals about nodes that are missing or wrong. rdma_cm, the last and without a number here, is left out."""
    numbers = device.attributes.get("dev", ())
    if not any(node.path.name.startswith("uverbs") for node in device.nodes[: len(numbers)]):
        why = f"{' and '.join(device.attributes['hca'])} has no uverbs device; is the module ib_uverbs loaded?"
        yield Signal(hardware, "uverbs-missing", Verdict.NOW, why)
    for node, number in zip(device.nodes, numbers, strict=False):
        path = node.path
        try:
            found = os.stat(f"{host.dev}{path.text.removeprefix('/dev')}")  # noqa: PTH116  # as above
        except OSError as error:
            reason = reason_of(error)
            yield Signal(hardware, "node-missing", Verdict.NOW, f"{path} cannot be used: {reason}")
            continue
        if not stat.S_ISCHR(found.st_mode):
            yield Signal(hardware, "not-a-device", Verdict.NOW, f"{path} is not a character device")
        elif number not in ("unknown", has := f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"):
            yield Signal(hardware, "wrong-node", Verdict.NOW, f"{path} is {has}, but the kernel's is {number}")


def _lost(host: Host, hardware: str, device: Device, names: list[str]) -> Iterator[Signal]:
    """A signal about adapters that have vanished: the driver has left, or a pod's network namespace has them."""
    address, driver = (device.attributes.get(name, ()) for name in ("address", "driver"))
    unbound = list(pci_health.driver_signals(host, address[0], driver)) if address and driver else []
    yield from unbound
    if unbound:
        return
    what = " and ".join(names)
    if rdma.is_exclusive(host):
        why = f"{what} is in another network namespace than the host's"
        yield Signal(hardware, "in-another-namespace", Verdict.NOW, why, unless_held=True)
    else:
        yield Signal(hardware, "hca-missing", Verdict.NOW, f"{what} is not in {rdma.INFINIBAND} any more")
