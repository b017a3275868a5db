"""The values that backends and the daemon share: what is found, how it is, who wants it, what a container gets.

Everything here is frozen. Import it from `backends.base`, beside the interface that speaks in it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import msgspec

from backends.host import HostPath


@dataclass(frozen=True, slots=True)
class Node:
    """A device node to hand to a container."""

    path: HostPath
    container_path: str
    permissions: str
    """Of "r", "w", "m" (DeviceSpec.permissions of the device plugin API)."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A host path to mount into a container."""

    path: HostPath
    container_path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """One piece of hardware that can be offered, as one look at the node found it."""

    key: str
    """Names it for ever within its unit and resource (UUID, PCI address, serial, node path); never an order."""
    unit: str
    """The unit of discovery it was found in."""
    hardware: frozenset[str]
    """What it owns: `pci:0000:3b:00.0`, `usb:1-2`, `node:c:10:232`. Owned by one resource at a time."""
    resource: str | None = None
    """The one resource it was built for (a bundle, a pool); None: any resource that selects it."""
    depends: frozenset[str] = frozenset()
    """Hardware it does not own but whose health counts for it (MIG → GPU, VF → PF)."""
    identity: str = ""
    """Tells another card at the same key; compared with what a pod was given."""
    nodes: tuple[Node, ...] = ()
    mounts: tuple[Mount, ...] = ()
    """What belongs to it beside its nodes."""
    exclusive: frozenset[str] = frozenset()
    """Of its hardware, what no other device of the same resource may have at a time."""
    numa_node: int | None = None
    """None where the kernel says -1 or nothing (kubelet contract: A5)."""
    ancestry: tuple[str, ...] = ()
    """Its PCI bridges, from the root."""
    attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """What selectors match and `explain` prints."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between two devices that a backend knows (NVLink, XGMI), with its weight."""

    one: str
    other: str
    weight: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something an operator should know: about what, and one sentence."""

    subject: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Discovery:
    """What one look at one unit found."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    problems: tuple[Problem, ...] = ()


class Verdict(enum.Enum):
    """What a signal means for the hardware it is about."""

    NOW = "now"  # proof: unhealthy at once
    DELAYED = "delayed"  # may be transient: unhealthy once it has lasted `after` seconds
    DEGRADED = "degraded"  # still offered; shown with its reason
    INFO = "info"  # shown only
    FINE = "fine"  # explicitly good


class Clears(enum.Enum):
    """What ends a latched signal."""

    REBIND = "rebind"
    RECOVERED = "recovered"
    OUR_RESET = "our-reset"
    BOOT = "boot"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Signal:
    """One observation about one piece of hardware."""

    hardware: str
    reason: str
    """Machine-readable: `node-missing`, `port-down`."""
    verdict: Verdict
    message: str
    """One sentence for a person."""
    after: float = 0.0
    """Seconds a DELAYED signal must last before the hardware is unhealthy."""
    recover_after: float = 0.0
    """Seconds it must be absent before the hardware is healthy again."""
    clears_on: frozenset[Clears] = frozenset()
    """Of a signal from a record: what ends it."""


@dataclass(frozen=True, slots=True)
class Uevent:
    """A kernel object event: a hint where to look, never a fact (sysfs is the truth)."""

    action: str
    subsystem: str
    devpath: str
    """Below /sys, starting with `/devices/`."""
    node: HostPath | None = None
    """The device node the event names (DEVNAME)."""
    properties: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """The device's own name in sysfs, the last part of `devpath`: `ptp0`, `0000:3b:00.0`."""
        return self.devpath.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class PathChange:
    """An entry of a watched directory appeared, vanished or changed."""

    path: HostPath


Hint = Uevent | PathChange


@dataclass(frozen=True, slots=True)
class Record:
    """A fact from the kernel that sysfs does not keep (an XID line, WEDGED, an IB async event)."""

    source: str
    boot: str
    sequence: int
    time: float
    """Seconds since boot, as the kernel stamped it."""
    text: str
    properties: Mapping[str, str] = field(default_factory=dict, hash=False)


Selector = Mapping[str, tuple[str, ...]]
"""Attribute → the values any of which must be among the device's."""


def _matches(selector: Selector, attributes: Mapping[str, tuple[str, ...]]) -> str | None:
    """Why the selector does not match, or None if it does."""
    for name, wanted in selector.items():
        found = attributes.get(name, ())
        if not {w.lower() for w in wanted} & {f.lower() for f in found}:
            return f"{name} is {' or '.join(found) or 'unknown'}, not {' or '.join(wanted)}"
    return None


Options = TypeVar("Options", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class ResourceSpec(Generic[Options]):
    """How one resource is made: which backend, which hardware, with which options."""

    backend: str
    options: Options
    select: tuple[Selector, ...] = ()
    """Any of them takes a device; none written takes every device of the backend."""
    exclude: tuple[Selector, ...] = ()
    replicas: int = 1
    """How many pods may share one device."""


@dataclass(frozen=True, slots=True)
class Resource(Generic[Options]):
    """A resource name and its spec, as configured."""

    name: str
    spec: ResourceSpec[Options]

    def refuses(self, device: Device) -> str | None:
        """Why this resource's selectors do not take the device, or None if they do."""
        for selector in self.spec.exclude:
            if _matches(selector, device.attributes) is None:
                return "it is excluded by " + " and ".join(f"{k} = {' or '.join(v)}" for k, v in selector.items())
        reasons = [_matches(selector, device.attributes) for selector in self.spec.select]
        if not reasons or None in reasons:
            return None
        return "; ".join(reason for reason in reasons if reason)


@dataclass(frozen=True, slots=True)
class Grant:
    """One ID that a pod asked for, with the device behind it."""

    id: str
    device: Device


@dataclass(frozen=True, slots=True)
class Released:
    """One ID that no pod holds any more. Neither its resource nor its device need exist by now."""

    resource: str
    id: str
    hardware: frozenset[str]


@dataclass(frozen=True, slots=True)
class ContainerEdits:
    """What a container gets with the devices it was given."""

    nodes: tuple[Node, ...] = ()
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    annotations: Mapping[str, str] = field(default_factory=dict, hash=False)
    cdi_devices: tuple[str, ...] = ()

    @classmethod
    def of(cls, grants: Iterable[Grant]) -> ContainerEdits:
        """The nodes and mounts of the granted devices, each once, however many tokens of a device were granted."""
        devices = [grant.device for grant in grants]
        return cls(
            nodes=tuple(dict.fromkeys(node for device in devices for node in device.nodes)),
            mounts=tuple(dict.fromkeys(mount for device in devices for mount in device.mounts)),
        )

    def merge(self, *others: ContainerEdits) -> ContainerEdits:
        """These edits and the others' in one; a node, mount or CDI name said twice is kept once.

        Nodes are told apart by their path in the container, as the kubelet does (kubelet contract: A4).
        """
        every = (self, *others)
        return ContainerEdits(
            nodes=tuple({n.container_path: n for e in reversed(every) for n in reversed(e.nodes)}.values())[::-1],
            mounts=tuple({m.container_path: m for e in reversed(every) for m in reversed(e.mounts)}.values())[::-1],
            env={key: value for e in reversed(every) for key, value in e.env.items()},
            annotations={key: value for e in reversed(every) for key, value in e.annotations.items()},
            cdi_devices=tuple(dict.fromkeys(name for e in every for name in e.cdi_devices)),
        )


@dataclass(frozen=True, slots=True)
class Watches:
    """What a backend wants to hear of; the sources serve this and nothing else."""

    subsystems: frozenset[str] = frozenset()
    """Of uevents; `ANY_SUBSYSTEM` for all of them."""
    directories: frozenset[HostPath] = frozenset()
    """Whose entries' coming and going is told; they need not exist yet. A directory itself is told when it
    begins to be watched (look at what is in it then), appears or vanishes."""

    def __or__(self, other: Watches) -> Watches:
        return Watches(self.subsystems | other.subsystems, self.directories | other.directories)


ANY_SUBSYSTEM: Final = "*"


class All(enum.Enum):
    """Stands for every unit of a backend."""

    ALL = "all"


ALL: Final = All.ALL
