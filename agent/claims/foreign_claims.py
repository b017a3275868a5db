"""Finds the hardware that another plugin gave to a pod: compares its stored answer with the devices that are there.

The kubelet's checkpoint keeps each answer. Its IDs are that plugin's own and mean nothing here, but its device nodes, and
the names in its environment and among its CDI devices, are the hardware's. It matters under whichever resource's name the
answer was given, ours or one that we do not serve, and whether that plugin is gone or lives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

from msgspec import Struct

from agent.claims.ledger import Pods, Traced
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


class Answer(Struct, frozen=True):
    """What pods got that have a slot, and for which slots."""

    pods: Pods
    """More than one, where the checkpoint has one that has ended."""
    trace: Trace
    slots: frozenset[SlotKey]
    entries: int
    """Of the checkpoint that it is made of; of several it is unknown which slots are for what."""


class Tracer:
    """Finds the hardware of traces among the devices of an inventory."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._revision = -1
        self._leads: Mapping[str, Mapping[str, frozenset[str]]] = {}

    def traced(
        self,
        answers: Mapping[SlotKey, Answer],
        backends: Mapping[SlotKey, str],
        own: Callable[[SlotKey], Device | None],
    ) -> dict[SlotKey, Traced]:
        """What each slot's answers lead to.

        Args:
            answers: by resource and ID; all slots of a container have the same.
            backends: which backend has the resource of each.
            own: the device that has a slot's ID now: what one ID of a container has so is not another's.
        """
        found: dict[tuple[int, str], tuple[Mapping[SlotKey, frozenset[str]], frozenset[str]]] = {}
        traced = {}
        for slot, answer in answers.items():
            if (key := (id(answer), backends[slot])) not in found:
                known = {it: device for it in answer.slots if (device := own(it)) is not None}
                theirs = _union(device.hardware for device in known.values())
                led_to = (device - theirs for device in _followed(answer.trace, self._leads_of(backends[slot])))
                devices = frozenset(filter(None, led_to))
                found[key] = _shares(answer, answer.slots - known.keys(), devices), _union(devices)
            shares, container = found[key]
            traced[slot] = Traced(answer.pods, shares[slot], container)
        return traced

    def hardware(self, trace: Trace, backend: str) -> frozenset[str]:
        """All hardware of a backend that a trace leads to."""
        return _union(_followed(trace, self._leads_of(backend)))

    def ours(self, trace: Trace) -> Iterator[tuple[str, frozenset[str]]]:
        """The hardware that a trace of any plugin leads to, with the backend that sees it; mounts alone lead nowhere."""
        for backend in self._inventory.selection.kinds():
            if devices := _followed(trace, self._leads_of(backend, mounts=False)):
                yield backend, _union(devices)

    def _leads_of(self, backend: str, *, mounts: bool = True) -> Mapping[str, frozenset[str]]:
        if self._revision != self._inventory.revision:
            self._revision, self._leads = self._inventory.revision, {}
        key = f"{backend}{mounts}"
        if (leads := self._leads.get(key)) is None:
            leads = leads_to(self._inventory.devices(backend), mounts=mounts)
            self._leads = {**self._leads, key: leads}
        return leads


def _followed(trace: Trace, leads: Mapping[str, frozenset[str]]) -> frozenset[frozenset[str]]:
    return frozenset(leads[it] for it in trace.nodes | trace.names if it in leads)


def _union(devices: Iterable[frozenset[str]]) -> frozenset[str]:
    """The hardware of all of them."""
    return frozenset[str]().union(*devices)


def _shares(
    answer: Answer, slots: Collection[SlotKey], devices: Collection[frozenset[str]]
) -> Mapping[SlotKey, frozenset[str]]:
    """What each slot of a container has of the devices that it was given for these.

    Of as many devices as slots, each has one: which, does not matter, since they end together. Otherwise each has all.
    """
    if answer.entries == 1 and len(slots) == len(devices):
        return dict(zip(sorted(slots), sorted(devices, key=sorted), strict=True))
    return dict.fromkeys(slots, _union(devices))


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
