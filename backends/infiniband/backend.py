"""The backend `infiniband`: its units are places with adapters, and the pools of resources that share all of theirs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

from msgspec.structs import replace

from backends.base import (
    All,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    Known,
    Node,
    Problem,
    Record,
    Signal,
    Watches,
)
from backends.errors import reason_of
from backends.infiniband import adapters, events, health, pools, port_health
from backends.infiniband.options import InfiniBandOptions, InfiniBandResource, complaints
from backends.linux import pci, pci_health, rdma
from backends.linux.rdma import Hca

_DEFAULTS: Final = InfiniBandOptions()


class InfiniBand(Backend[InfiniBandOptions]):
    """Hands out RDMA adapters."""

    options_type: ClassVar = InfiniBandOptions
    attributes: ClassVar = adapters.ATTRIBUTES
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
        likely = (address for address, kind, vendor in pci.announced(self.host) if adapters.is_likely(kind, vendor))
        shared = (pools.unit(resource) for resource in self.resources if resource.spec.options.shared is not None)
        return dict.fromkeys((*rdma.places(self.host), *likely, *shared))

    def discover(self, unit: str) -> Discovery:
        """The adapter at a place, or the pool of a resource."""
        if unit.startswith(pools.PREFIX):
            return self._pool(self.resource(unit.removeprefix(pools.PREFIX)))
        adapter = rdma.read(self.host, unit)
        if adapter is None:
            return self._without_adapter(unit)
        function = adapters.function_of(self.host, adapter)
        hcas = rdma.hcas(self.host, adapter)
        states = adapters.port_states(self.host, hcas)
        device = adapters.device(self.host, adapter, hcas, function, states, self.resources)
        problems = (*adapter.problems, *(function.problems if function else ()), *self._missing_ports(hcas, device))
        return Discovery((device,), problems=problems)

    def _without_adapter(self, unit: str) -> Discovery:
        function = pci.read(self.host, unit) if pci.ADDRESS.fullmatch(unit) else None
        if function is None or not adapters.is_likely(function.kind, function.vendor):
            return Discovery()
        return Discovery((adapters.bare(self.host, function),), problems=function.problems)

    def _missing_ports(self, hcas: Iterable[Hca], device: Device) -> Iterator[Problem]:
        """A problem for each port that the resource asks for by number and the adapter does not have."""
        if (taker := self._taker(device)) is None:
            return
        for hca in hcas:
            for number in port_health.missing((port.number for port in hca.ports), taker.spec.options):
                yield Problem(device.key, f"{hca.name} has no port {number}, which {taker.name} asks for")

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
                function = adapters.function_of(self.host, adapter)
                hcas = rdma.hcas(self.host, adapter)
                device = adapters.device(self.host, adapter, hcas, function, (), self.resources)
                if device.unusable or resource.refuses(device) is not None:
                    continue
                if (other := pools.kept_from(resource, device, self.resources)) is None:
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
        return Discovery((pools.pool(resource, members),) if members else (), problems=tuple(problems))

    # --- how it is ---

    def probe(self, device: Device) -> Iterable[Signal]:
        """The health of an adapter; a pool has none of its own."""
        if device.resource is not None or device.unusable:
            return ()
        taker = self._taker(device)
        return health.signals(self.host, device, taker.spec.options if taker else _DEFAULTS)

    def glance(self, device: Device) -> object:
        """The state of the ports of an adapter; a pool has none of its own."""
        if device.resource is not None or device.unusable:
            return ()
        virtual_ports = any(resource.spec.options.virtual_ports for resource in self.resources)
        return health.glance(self.host, device, virtual_ports=virtual_ports)

    def _taker(self, device: Device) -> InfiniBandResource | None:
        """The first resource that selects the adapter: its options decide about health."""
        return next((resource for resource in self.resources if resource.refuses(device) is None), None)

    def signals(self, record: Record) -> Iterable[Signal]:
        """PCI error recoveries, of any function: the event does not say whether it is an adapter."""
        return pci_health.recovery_signals(record)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # the same whatever there is
        """Events of adapters, their functions, nodes and interfaces; and a glance at the ports every few seconds."""
        return Watches(
            subsystems=events.SUBSYSTEMS,
            directories=frozenset((rdma.NODES,)),
            facts=frozenset((pci_health.FACT,)),
            links=True,
            poll=min((float(resource.spec.options.poll) for resource in self.resources), default=None),
        )

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """The places that an event is about, and with them the pools."""
        return events.affected(hint, known)

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
        nodes = [node for node in ContainerEdits.of(grants).nodes if _kind(node) not in left_out]
        last = [node for node in nodes if node.path == rdma.RDMA_CM]
        every = [*(node for node in nodes if node.path != rdma.RDMA_CM), *last]
        return ContainerEdits(nodes=tuple(replace(node, permissions=permissions) for node in every))


def _kind(node: Node) -> str:
    return node.path.name.rstrip("0123456789")


def _tokens(resource: InfiniBandResource) -> tuple[str, ...]:
    """The IDs of a pool's tokens.

    k8s-rdma-shared-dev-plugin has bare numbers, those of one pool in each: kubelets before kubernetes 140323 tell the health
    of one to pods that have the other (kubelet contract: A11.8). A pod that holds a number keeps it: it is a former ID.
    """
    return tuple(f"{resource.name}::{n}" for n in range(resource.spec.options.shared or 0))
