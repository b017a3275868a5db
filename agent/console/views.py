"""What the daemon shows of itself: frozen values, the same for the admin service, HTTP and the commands' JSON.

Times are seconds since 1970. A field that is added needs a default: a daemon of an earlier version does not send it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec

STATES: Final = ("Healthy", "Degraded", "Unhealthy", "Drained")
"""In the order of the faces' tables; a drained device is Unhealthy to the kubelet."""

NAMES_NOTHING: Final = "no device gives it a name so far"
"""Of a template that has given no resource."""

ENDS: Final[Mapping[str, str]] = {
    "rebind": "its driver bound again",
    "recovered": "a recovery that the kernel tells of",
    "our-reset": "a reset by Fairlead",
    "boot": "a reboot",
    "operator": "`fairlead undrain`",
}
"""What `backends.base.Clears` says, for a person."""
ENDED: Final = "ended by"
"""How a note of what ended a fault begins."""


_DRAINED: Final = "drained"  # `agent.health.book.DRAINED`; a command that shows views need not import health


def _condition(state: str, reason: str) -> str:
    return "Drained" if reason == _DRAINED else state


class Holder(msgspec.Struct, frozen=True, gc=False):
    """A container that a pod's device was given to."""

    namespace: str
    pod: str
    """Empty where the kubelet does not name the pod; then it has a `uid`."""
    container: str
    """Empty if it is not known."""
    uid: str = ""
    claim: str = ""
    """The ResourceClaim by which it has the device; empty where it has it by the device plugin API."""

    @property
    def name(self) -> str:
        """The pod, as a person reads it."""
        return f"{self.namespace}/{self.pod}" if self.pod else f"the pod with the UID {self.uid}"

    def __str__(self) -> str:
        """The pod and the container."""
        by = ", ".join(filter(None, (self.container, f"by ResourceClaim {self.claim}" if self.claim else "")))
        return f"{self.name} ({by})" if by else self.name


class Held(msgspec.Struct, frozen=True, gc=False):
    """An ID that a pod holds."""

    id: str
    """One of the device's `ids`; else RESOURCE/ID, where the pod holds the hardware through another resource."""
    holders: tuple[Holder, ...] = ()
    """Who, as the kubelet said last; none while a pod starts, and from its end until the kubelet's checkpoint shows that.

    Those whom podresources does not name have what the checkpoint, or a cgroup, tells of them.
    """


class Device(msgspec.Struct, frozen=True, gc=False):
    """One device of a resource, with those of its IDs there that are in the same state; a tombstone's key is its ID."""

    key: str
    ids: tuple[str, ...]
    state: str
    """As `agent.model.State`: Healthy, Degraded, Unhealthy."""
    reason: str = ""
    message: str = ""
    since: float = 0.0
    """When it came to be in this state; 0 if unknown."""
    numa_node: int | None = None
    ancestry: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    held: tuple[Held, ...] = ()
    name: str = ""
    """What its driver calls it: `nvidia3`, `mlx5_0`; empty if there is no such name."""
    model: str = ""
    """In short: `H100`, `ConnectX-7`; empty if it is not known."""
    ends: str = ""
    """What ends it where it is not Healthy, in words; empty if that is not known."""
    nodes: tuple[str, ...] = ()
    """Paths of its nodes, the first of them."""
    besides: str = ""
    """Of a drained one, the reason that it would have without the drain."""
    until: str = ""
    """When its drain ends by itself, in words; empty if it does not."""

    @property
    def pods(self) -> tuple[str, ...]:
        """Who has it, each once; of a pod that is not named, that."""
        return tuple(dict.fromkeys(who.name for held in self.held for who in held.holders))

    @property
    def condition(self) -> str:
        """Its state; `Drained`, as in `Period`, where an operator has taken it out of service, which is no failure."""
        return _condition(self.state, self.reason)


class Resource(msgspec.Struct, frozen=True):
    """One resource, configured or retiring."""

    name: str
    backend: str
    """Empty while it retires because a pod still holds of it."""
    registered: bool
    streaming: bool
    complaint: str = ""
    """Why it is not registered, or what is wrong with it."""
    devices: tuple[Device, ...] = ()

    @property
    def by_state(self) -> Counter[str]:
        """How many of its IDs are in each of `STATES`."""
        number = Counter(dict.fromkeys(STATES, 0))
        for device in self.devices:
            number[device.condition] += len(device.ids)
        return number

    @property
    def in_use(self) -> int:
        """How many IDs pods hold."""
        return sum(len(device.held) for device in self.devices)

    @property
    def served(self) -> bool:
        """Whether the kubelet has the resource, with an open stream."""
        return self.registered and self.streaming

    @property
    def registration(self) -> tuple[str, str]:
        """How it stands with the kubelet, in a word, and which state of a device is as good or bad."""
        if not self.backend:
            return "retiring", "Degraded"
        if self.served:
            return "registered", "Healthy"
        return ("no stream" if self.registered else "waiting"), "Unhealthy"

    @property
    def overtaken(self) -> bool:
        """Whether another plugin has registered it since we did. Our stream is open then."""
        return self.streaming and not self.registered and bool(self.complaint)


class Template(msgspec.Struct, frozen=True):
    """A configured name with attributes, which stands for a resource for each of their values."""

    name: str
    backend: str
    complaint: str = ""
    """What is wrong with it."""
    resources: tuple[str, ...] = ()
    """Those that it has given so far."""


class Unclaimed(msgspec.Struct, frozen=True):
    """A device that no resource has, and that may have been offered."""

    device: str
    backend: str
    why: str
    resource: str = ""
    """The one that is meant to have it; empty: none, and all is well."""
    reason: str = ""
    """One of `agent.inventory.shortfall.REASONS`."""
    since: float = 0.0
    """When it came to be missing, as far as this run of the daemon knows."""
    numa_node: int | None = None
    ancestry: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    name: str = ""
    """As of a `Device`; of one that is gone, what all of these were."""
    model: str = ""
    nodes: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    """Those that it had while it was offered."""


class Problem(msgspec.Struct, frozen=True):
    """Something an operator should know."""

    backend: str
    subject: str
    message: str


class Kubelet(msgspec.Struct, frozen=True):
    """The kubelet, as far as it is seen."""

    socket: str
    present: bool
    waiting_for: str = ""
    """What is awaited, as systemd is told."""


class Configuration(msgspec.Struct, frozen=True):
    """The configuration that is in force, and the last attempt to read it again."""

    file: str
    """Empty if there is none."""
    loaded: float
    mistakes: tuple[str, ...] = ()
    """Of the last attempt; empty if it went well."""
    needs_restart: tuple[str, ...] = ()
    """Settings that have changed in the file and that only a restart applies."""


class Witness(msgspec.Struct, frozen=True):
    """A way to hear what sysfs does not keep (XIDs): the kernel's log, or a vendor's library."""

    name: str
    heard: bool
    why: str = ""
    """Why it is not heard."""
    needed: bool = True
    """Whether it should be heard: not where another tells the same."""


class Status(msgspec.Struct, frozen=True):
    """Everything there is to see, at one moment."""

    version: str
    started: float
    now: float
    kubelet: Kubelet
    configuration: Configuration
    resources: tuple[Resource, ...] = ()
    unclaimed: tuple[Unclaimed, ...] = ()
    problems: tuple[Problem, ...] = ()
    node: str = ""
    """Kubernetes' name for it, or the machine's own."""
    templates: tuple[Template, ...] = ()
    """The configured names that are templates."""
    standing_by: bool = False
    """Whether another Fairlead serves the node, and this one is ready to take over."""
    standby: str = ""
    """Process and version of the one that is ready to take over from this one; empty if there is none."""
    witnesses: tuple[Witness, ...] = ()
    """Those of what is configured."""

    def unready(self) -> list[str]:
        """One sentence for each resource that the kubelet has not, but for those that retire or another Fairlead serves."""
        return [
            f"{it.name} is registered, but the kubelet has no stream open: {it.complaint or 'it may come'}"
            if it.registered
            else f"{it.name} is not registered: {it.complaint or self.kubelet.waiting_for or 'its turn comes'}"
            for it in self.resources
            if it.backend and not it.served and not self.standing_by
        ]


class Event(msgspec.Struct, frozen=True):
    """Something that happened, as one line of the log tells it."""

    number: int
    """Counts up from 1 in one run of the daemon."""
    time: float
    kind: str
    """The log's event: `device-changed`, `registered`."""
    resource: str = ""
    device: str = ""
    state: str = ""
    reason: str = ""
    message: str = ""
    name: str = ""
    """What people call the device: `H100 nvidia3`; empty if that is not known."""

    @property
    def condition(self) -> str:
        """Its state, as of a `Device`."""
        return _condition(self.state, self.reason)


class Decision(msgspec.Struct, frozen=True):
    """What became of a device in one resource, and why."""

    resource: str
    taken: bool
    why: str


class Signal(msgspec.Struct, frozen=True):
    """One observation about its hardware."""

    hardware: str
    reason: str
    verdict: str
    message: str
    since: float
    counts: bool
    """Whether it makes the hardware Unhealthy or Degraded now; if not, it has not lasted long enough yet."""
    clears_on: tuple[str, ...] = ()
    """What ends it, if it is latched."""
    source: str = ""
    """`probe`, `record`, `operator` (a drain) or `quarantine`."""
    changes: float | None = None
    """When time alone will change what it means."""
    unless_held: bool = False
    """It does not count while a pod holds the hardware."""


class GivenMount(msgspec.Struct, frozen=True):
    """A mount that a container would get."""

    host_path: str
    container_path: str
    read_only: bool


class GivenNode(msgspec.Struct, frozen=True):
    """A device node that a container would get."""

    host_path: str
    container_path: str
    permissions: str


class Gift(msgspec.Struct, frozen=True):
    """What a container with the device would get."""

    envs: Mapping[str, str] = {}
    mounts: tuple[GivenMount, ...] = ()
    devices: tuple[GivenNode, ...] = ()
    annotations: Mapping[str, str] = {}
    cdi_devices: tuple[str, ...] = ()
    cdi_spec: str = ""
    """The file by which the container runtime makes the nodes and mounts; empty where the kubelet has it make them."""


class Note(msgspec.Struct, frozen=True, gc=False):
    """Something happened to its hardware that changed no health: an XID of an application."""

    hardware: str
    reason: str
    message: str
    time: float
    count: int = 1
    """How often, since then."""
    pid: int | None = None
    """The process, as the host numbers it."""
    process: str = ""
    pods: tuple[str, ...] = ()
    """Whose it was, as `namespace/name`; several: any of these."""


class Fault(msgspec.Struct, frozen=True):
    """A fault that is over."""

    reason: str
    message: str
    begins: float
    ends: float
    by: str
    """What ended it, or what came then."""


class Explanation(msgspec.Struct, frozen=True):
    """All that is known of one device: what was read, what was decided, how it is, what a pod would get."""

    key: str
    backend: str
    unit: str
    identity: str = ""
    hardware: tuple[str, ...] = ()
    depends: tuple[str, ...] = ()
    numa_node: int | None = None
    ancestry: tuple[str, ...] = ()
    attributes: Mapping[str, tuple[str, ...]] = {}
    resource: str = ""
    """The one that offers it; empty if none does."""
    decisions: tuple[Decision, ...] = ()
    ids: tuple[str, ...] = ()
    state: str = ""
    reason: str = ""
    message: str = ""
    signals: tuple[Signal, ...] = ()
    problems: tuple[Problem, ...] = ()
    gift: Gift | None = None
    """None if it is not offered."""
    refusal: str = ""
    """Why a pod would be refused although it is offered."""
    held: tuple[Held, ...] = ()
    since: float = 0.0
    """When it came to be in this state; 0 if unknown."""
    notes: tuple[Note, ...] = ()
    """What happened to its hardware beside, in the last 24 hours."""
    besides: str = ""
    """As of a `Device`."""
    until: str = ""
    """As of a `Device`."""
    fault: Fault | None = None
    """The last that has ended, of the last 24 hours."""
    node: str = ""
    """As of a `Status`."""

    @property
    def condition(self) -> str:
        """Its state, as of a `Device`."""
        return _condition(self.state, self.reason)


class Period(msgspec.Struct, frozen=True, gc=False):
    """From when until when a device was so."""

    begins: float
    ends: float
    state: str
    """Healthy, Degraded, Unhealthy, Drained, Gone; Unknown: Fairlead did not run."""
    reason: str = ""
    message: str = ""
    holders: tuple[str, ...] = ()
    """The pods that had it, as `namespace/name`."""


class History(msgspec.Struct, frozen=True, gc=False):
    """How a device was in the last 24 hours."""

    key: str
    resource: str
    """Empty if none has offered it in that time."""
    periods: tuple[Period, ...] = ()
    """Without a gap, in their order; none if no resource has offered it."""
    notes: tuple[Note, ...] = ()
    """What happened to its hardware beside."""


class Histories(msgspec.Struct, frozen=True):
    """How all devices were."""

    plain: tuple[Period, ...] = ()
    """Of those that are not among the others: they were healthy and free all the time."""
    others: tuple[History, ...] = ()
    notes: tuple[Note, ...] = ()
    """What happened to hardware beside, the oldest first; the others' own are empty."""


class Drained(msgspec.Struct, frozen=True):
    """What a drain took out of service."""

    ids: tuple[str, ...]
    held: tuple[str, ...]
    """What pods hold of that hardware, also where it is gone and so has none of `ids`; they keep it."""
    problem: str = ""
    """Why a restart would forget it; empty if it would not."""
    replaced: tuple[str, ...] = ()
    """The drains with another reason or end that were in force before, one sentence each."""
    name: str = ""
    """What its driver calls it; empty if there is no such name."""
    pods: tuple[str, ...] = ()
    """Who holds it, as `namespace/name`, as far as the kubelet has named them."""
    besides: tuple[str, ...] = ()
    """The reasons that it has beside the drain, and that `fairlead undrain` would end, too."""


class Undrained(msgspec.Struct, frozen=True):
    """What is back in service."""

    ids: tuple[str, ...]
    ended: tuple[str, ...]
    """What ended: `drained`, `flapping`, `xid-79`; nothing if there was nothing."""
    name: str = ""
    """What its driver calls it; empty if there is no such name."""


class HandedOver(msgspec.Struct, frozen=True):
    """Who serves the node now."""

    standby: str
    """Its process ID and version."""


class Reloaded(msgspec.Struct, frozen=True):
    """What a new configuration changed."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    needs_restart: tuple[str, ...] = ()
