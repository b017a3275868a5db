"""Finds the hardware that another plugin gave to a pod: compares its stored answer with the devices that are there.

The kubelet's checkpoint keeps each answer. Its IDs are that plugin's own and mean nothing here, but its device nodes, and
the names in its environment and among its CDI devices, are the hardware's. It matters under whichever resource's name the
answer was given, ours or one that we do not serve, and whether that plugin is gone or lives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from agent.inventory.inventory import Inventory
from agent.model import SlotKey
from backends.base import Device

_OF_DRIVERS: Final = frozenset(
    f"/dev/{name}"
    for name in (
        "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "kfd", "vfio/vfio", "iommu", "infiniband/rdma_cm",
    )
)  # fmt: skip
"""Nodes of a driver, not of one device."""


class Trace(Struct, frozen=True):
    """What a container got with its devices."""

    nodes: frozenset[str] = frozenset()
    """The host's paths of device nodes and mounts."""
    names: frozenset[str] = frozenset()
    """Values of environment variables, and names of CDI devices."""


class Tracer:
    """Finds the hardware of traces among the devices of an inventory."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._revision = -1
        self._leads: Mapping[str, Mapping[str, frozenset[str]]] = {}

    @property
    def revision(self) -> int:
        """Another number when other devices are there, and a trace may lead to them."""
        return self._inventory.revision

    def hardware(
        self, traces: Mapping[SlotKey, Trace], backends: Mapping[SlotKey, str]
    ) -> dict[SlotKey, frozenset[str]]:
        """The hardware that each trace leads to, of those that lead to any.

        Args:
            traces: by resource and ID.
            backends: which backend has the resource of each.
        """
        found = {}
        of_one: dict[tuple[int, str], frozenset[str]] = {}  # all devices of a container have one trace
        for slot, trace in traces.items():
            key = id(trace), backends[slot]
            if key not in of_one:
                of_one[key] = _followed(trace, self._leads_of(backends[slot]))
            if of_one[key]:
                found[slot] = of_one[key]
        return found

    def ours(self, trace: Trace) -> Iterator[tuple[str, frozenset[str]]]:
        """The hardware that a trace of any plugin leads to, with the backend that sees it; mounts alone lead nowhere."""
        for backend in self._inventory.selection.kinds():
            if hardware := _followed(trace, self._leads_of(backend, mounts=False)):
                yield backend, hardware

    def _leads_of(self, backend: str, *, mounts: bool = True) -> Mapping[str, frozenset[str]]:
        if self._revision != self._inventory.revision:
            self._revision, self._leads = self._inventory.revision, {}
        key = f"{backend}{mounts}"
        if (leads := self._leads.get(key)) is None:
            leads = leads_to(self._inventory.devices(backend), mounts=mounts)
            self._leads = {**self._leads, key: leads}
        return leads


def _followed(trace: Trace, leads: Mapping[str, frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*(leads.get(it, ()) for it in trace.nodes | trace.names))


def leads_to(devices: Iterable[Device], *, mounts: bool = True) -> Mapping[str, frozenset[str]]:
    """Path or name → the hardware of the one device that has it; what several have tells nothing."""
    owners: defaultdict[str, set[frozenset[str]]] = defaultdict(set)
    for device in devices:
        for clue in _clues(device, mounts=mounts):
            owners[clue].add(device.hardware)
    return {clue: next(iter(found)) for clue, found in owners.items() if len(found) == 1 and clue not in _OF_DRIVERS}


def _clues(device: Device, *, mounts: bool) -> Iterator[str]:
    for node in device.nodes:
        if not node.shared:
            yield node.path.text
    for mount in device.mounts if mounts else ():
        yield mount.path.text
    if device.identity:
        yield device.identity
    for hardware in device.hardware:
        kind, _, address = hardware.partition(":")
        if kind in ("pci", "mdev"):
            yield address
