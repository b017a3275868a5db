"""The values of the device side: health, slots, snapshots, and what pods hold."""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Mapping
from typing import Final, final

from msgspec import Struct, field

from backends.base import Device


class State(enum.Enum):
    """How hardware is. The kubelet knows Healthy and Unhealthy only; Degraded is Healthy to it."""

    HEALTHY = "Healthy"
    DEGRADED = "Degraded"
    UNHEALTHY = "Unhealthy"


class Health(Struct, frozen=True):
    """The health of hardware, or of the slot that offers it."""

    state: State
    reason: str = ""
    """Machine-readable: `node-missing`, `gone`, `replaced`."""
    message: str = ""
    """One sentence for a person."""
    since: float = 0.0
    """Seconds on the agent's monotonic clock; a face that shows it converts."""
    while_held: Health | None = None
    """What it is instead while a pod holds the hardware; None: the same."""

    @property
    def offered(self) -> bool:
        """Whether it is Healthy to the kubelet."""
        return self.state is not State.UNHEALTHY

    @property
    def to_holder(self) -> Health:
        """What it is while a pod holds the hardware."""
        return self.while_held or self

    def says_same(self, other: Health) -> bool:
        """Whether it says the same as another; the times may differ."""
        if self is other:
            return True
        mine, theirs = self.to_holder, other.to_holder
        return (self.state is other.state and self.reason == other.reason and self.message == other.message) and (
            mine.state is theirs.state and mine.reason == theirs.reason and mine.message == theirs.message
        )


HEALTHY = Health(State.HEALTHY)

FORGOTTEN: Final = "forgotten"
"""The reason of a slot that a pod holds and the kubelet does not know to be held: it lost its record."""

TWO_PODS: Final = "two-pods"
"""The reason of a slot for one pod that two pods hold."""

REPLACED: Final = frozenset({"replaced", "node-replaced"})
"""The reasons of a slot that a pod holds and that has another device than the pod was given; the second where that was a node.

`agent/inventory/ownership.py` says both, of the pod's ID: "it is … now; the pod that holds it was given …". The second is also what
`backends/chardev/finder.py` says of a node's hardware, whether a pod has it or not: "/dev/… is another device now: …".
"""


@final
class Slot(Struct, frozen=True, gc=False):
    """One advertised ID; without a device it is a tombstone (kubelet contract: A7)."""

    id: str
    device: Device | None
    health: Health


class Snapshot(Struct, frozen=True):
    """Everything that one resource advertises, at one generation."""

    resource: str
    generation: int
    slots: Mapping[str, Slot]
    changed: frozenset[str] | None = None
    """IDs that were added, removed or altered since the generation before; None: take all as changed."""
    omitted: int = 0
    """How many unclaimed slots are left out, to pass the kubelet's message limit."""

    def changed_since(self, before: Mapping[str, Slot]) -> Collection[str]:
        """The IDs that may be others than they were, with the slots of the generation before."""
        return self.changed if self.changed is not None else before.keys() | self.slots.keys()


class Transition(Struct, frozen=True):
    """A device (with all its IDs) that appeared, vanished, or changed its health."""

    resource: str
    device: str
    """The device's key; for a tombstone its ID."""
    state: str
    """`Healthy`, `Degraded`, `Unhealthy`, or `Gone` where nothing is listed any more."""
    reason: str
    message: str
    ids: int
    """How many IDs it concerns."""
    name: str = ""
    """What people call the device: `H100 nvidia3`; empty if it has no such name."""


SlotKey = tuple[str, str]
"""Resource and ID: what the kubelet knows a slot by."""


class ResourceClaim(Struct, frozen=True):
    """For which ResourceClaim an ID was given, and as what (dynamic resource allocation)."""

    uid: str
    namespace: str
    name: str
    pool: str
    """Of the allocated device, as the ResourceSlice has it."""
    device: str
    share: str = ""
    """Which of several allocations of one device; empty where the device has one."""
    boot: str = ""
    """The machine's boot in which it was prepared: what was done to hardware before, and what lay in /run, is gone."""
    driver: str = ""
    """By whose name it was allocated, and the kubelet tells its end; empty in what older versions recorded."""


class Held(Struct, frozen=True, gc=False):
    """What a pod holds, or is being given: one ID of a resource."""

    resource: str
    id: str
    backend: str
    hardware: frozenset[str] = field(default_factory=frozenset)
    """Empty where only the kubelet remembers the claim and the device is not there to ask."""
    identity: str = ""
    """The device's at the time it was given; empty if unknown."""
    place: frozenset[str] = frozenset()
    """The device's at that time; empty if unknown, as in what older versions recorded."""
    foreign: bool = False
    """Another plugin gave it, under a resource that is not ours: the slot is in no list, and the hardware is to be seen."""
    traced: bool = False
    """Another plugin gave it, under a resource of ours: the hardware is what its answer led to among what was there."""
    pods: frozenset[str] = frozenset()
    """UIDs of the pods that have it: whose processes were seen to run, else whom the kubelet's checkpoint named last where
    processes are to be seen."""
    trouble: str = ""
    """`FORGOTTEN` or `TWO_PODS`; empty: all is well."""
    claim: ResourceClaim | None = None
    """For which it was given; it ends when the kubelet unprepares that. None: by an Allocate."""
    rebooted: bool = False
    """It was given before the machine's last boot, or perhaps, and was not seen since: its nodes may have other numbers, and those
    are the pod's."""

    @classmethod
    def of(cls, resource: str, device_id: str, backend: str, device: Device) -> Held:
        """The claim of a pod that is given this device under this ID."""
        return cls(resource, device_id, backend, device.hardware, device.identity, device.place)

    @property
    def slot(self) -> SlotKey:
        """What the kubelet knows it by."""
        return self.resource, self.id

    @property
    def things(self) -> frozenset[Hashable]:
        """What only one call of a backend at a time may be about: its hardware, and the slot itself."""
        return frozenset((*self.hardware, self.slot))
