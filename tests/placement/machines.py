"""Machines with published topologies, as the devices and links of one resource: what `nvidia-smi topo -m` prints of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from agent.model import HEALTHY, Health, Slot
from backends.base import Device, Link


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices of one resource."""

    devices: Sequence[Device]
    links: Sequence[Link] = ()

    def slots(self, replicas: int = 1, health: Mapping[str, Health] | None = None) -> dict[str, Slot]:
        """What the inventory has of them."""
        states = health or {}
        return {
            slot_id: Slot(slot_id, device, states.get(device.key, HEALTHY))
            for device in self.devices
            for slot_id in ([device.key] if replicas == 1 else [f"{device.key}::{n}" for n in range(replicas)])
        }


@dataclass(slots=True)
class Slots:
    """Hands out bridges' addresses, each once."""

    bus: int = 0
    found: list[Device] = field(default_factory=list)

    def bridge(self) -> str:
        self.bus += 1
        return f"0000:{self.bus:02x}:00.0"

    def device(self, ancestry: Iterable[str], numa_node: int | None) -> None:
        key = f"g{len(self.found):02}"
        self.found.append(Device(key, key, frozenset({key}), ancestry=tuple(ancestry), numa_node=numa_node))

    def switch(self, number: int, numa_node: int, above: Sequence[str] = ()) -> None:
        """So many devices, each at a port of its own of a switch; under a root port of its own, if nothing is said."""
        above = above or (f"pci0000:{numa_node:02x}", self.bridge())
        upstream = self.bridge()
        for _ in range(number):
            self.device((*above, upstream, self.bridge()), numa_node)


def linked(weights: Mapping[str, int]) -> list[Link]:
    """`"0-3": 2`: two links between these devices."""
    return [Link(f"g{int(a):02}", f"g{int(b):02}", n) for pair, n in weights.items() for a, b in [pair.split("-")]]


def all_linked(numbers: Iterable[int], weight: int) -> list[Link]:
    return [Link(f"g{a:02}", f"g{b:02}", weight) for a, b in combinations(numbers, 2)]


def dgx1() -> Machine:
    """8 V100 in a hybrid cube mesh: two at a switch, two switches a socket."""
    slots = Slots()
    for numa_node in (0, 0, 1, 1):
        slots.switch(2, numa_node)
    text = "0-1:1 0-2:1 0-3:2 0-4:2 1-2:2 1-3:1 1-5:2 2-3:2 2-6:1 3-7:1 4-5:1 4-6:1 4-7:2 5-6:2 5-7:1 6-7:2"  # as published
    return Machine(slots.found, linked({pair: int(n) for pair, n in (part.split(":") for part in text.split())}))


def dgx2() -> Machine:
    """16 V100 behind NVSwitches: two at a switch, two of these switches behind one more, four of those in all."""
    slots = Slots()
    for numa_node in (0, 0, 1, 1):
        root = (f"pci0000:{numa_node:02x}", slots.bridge(), slots.bridge())
        for _ in range(2):
            slots.switch(2, numa_node, (*root, slots.bridge()))
    return Machine(slots.found, all_linked(range(16), 6))


def dgx_a100() -> Machine:
    """8 A100 behind NVSwitches: pairs on NUMA nodes 3, 1, 7 and 5."""
    slots = Slots()
    for numa_node in (3, 1, 7, 5):
        slots.switch(2, numa_node)
    return Machine(slots.found, all_linked(range(8), 12))


def hgx_h100() -> Machine:
    """8 H100 behind NVSwitches: each at a root port of its own, four a socket."""
    slots = Slots()
    for number in range(8):
        numa_node = number // 4
        slots.device((f"pci0000:{number:02x}", slots.bridge(), slots.bridge(), slots.bridge()), numa_node)
    return Machine(slots.found, all_linked(range(8), 18))


def a800() -> Machine:
    """8 A800: as the H100s, with fewer links."""
    return Machine(hgx_h100().devices, all_linked(range(8), 8))


def l40s() -> Machine:
    """8 L40S without links: two at a switch, two switches a socket, each with a host bridge of its own."""
    slots = Slots()
    for number, numa_node in enumerate((0, 0, 1, 1)):
        slots.switch(2, numa_node, (f"pci0000:{number:02x}", slots.bridge()))
    return Machine(slots.found)


def mi210() -> Machine:
    """8 MI210 in two hives of four, one a socket, each at a root port of its own."""
    slots = Slots()
    for number in range(8):
        slots.device((f"pci0000:{number:02x}", slots.bridge()), number // 4)
    return Machine(slots.found, [*all_linked(range(4), 1), *all_linked(range(4, 8), 1)])


def mi250x() -> Machine:
    """16 dies of 8 MI250X: two on a board with four links, in hives of four boards with fewer links of unequal weight."""
    slots = Slots()
    for number in range(8):
        root = (f"pci0000:{number:02x}", slots.bridge())
        slots.device(root, number // 4)
        slots.device(root, number // 4)
    hive = "0-1:4 2-3:4 4-5:4 6-7:4 0-2:1 0-6:2 1-3:2 1-5:1 2-6:1 3-7:1 4-6:1 5-7:2 2-4:2"
    pairs = {pair: int(n) for pair, n in (part.split(":") for part in hive.split())}
    second = {"-".join(str(int(end) + 8) for end in pair.split("-")): n for pair, n in pairs.items()}
    return Machine(slots.found, linked({**pairs, **second}))


MACHINES = {machine.__name__: machine for machine in (dgx1, dgx2, dgx_a100, hgx_h100, a800, l40s, mi210, mi250x)}
"""By name."""
