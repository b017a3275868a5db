"""The values that backends and the daemon share: what is found, how it is, who wants it, what a container gets.

Everything here is frozen but `Known`, which discovery keeps for backends. Import it from `backends.base`, beside the interface that speaks in it.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Set
from typing import Final, Generic, Literal, TypeVar

import msgspec
from msgspec import Struct

from backends.interface.host import HostPath
from backends.interface.written import Selector, mismatch


class Node(Struct, frozen=True, gc=False):
    """A device node to hand to a container."""

    path: HostPath
    container_path: str
    permissions: str
    """Of "r", "w", "m" (DeviceSpec.permissions of the device plugin API)."""
    shared: bool = False
    """Other devices may have it, too: a pod that has it need not have this device."""


class Mount(Struct, frozen=True, gc=False):
    """A host path to mount into a container."""

    path: HostPath
    container_path: str
    read_only: bool = False


class Device(Struct, frozen=True, gc=False):
    """One piece of hardware that can be offered, as one look at the node found it."""

    key: str
    """Names it for ever within its unit and resource (UUID, PCI address, serial, node path); never its place in an order."""
    unit: str
    """The unit of discovery it was found in."""
    hardware: frozenset[str]
    """What it owns: `pci:0000:3b:00.0`, `usb:1-2`, `node:c:10:232`. Owned by one resource at a time."""
    resource: str | None = None
    """The one resource it was built for (a bundle, a pool), as configured; None: any resource that selects it."""
    depends: frozenset[str] = frozenset()
    """Hardware that it does not own and whose health counts for it (MIG → GPU, VF → PF)."""
    identity: str = ""
    """Differs where another card has the same key; compared with what a pod was given. Empty if it is not known now."""
    aliases: frozenset[str] = frozenset()
    """Other identities of the same hardware: what an older version recorded, or what a stick is before it has firmware."""
    place: frozenset[str] = frozenset()
    """Where it is, under names that outlast a boot: `usb:0000:00:14.0-usbv2-1`. Several devices may be at one place, as the
    nodes of one stick are. What has another place than a pod's device is another device."""
    bindings: Mapping[str, str] = {}
    """Hardware that has a driver → a value that changes whenever a driver is bound to it again, and is the same for every
    backend (`backends.linux.pci.Function.binding`). A change ends latched signals that wait for `Clears.REBIND`."""
    nodes: tuple[Node, ...] = ()
    mounts: tuple[Mount, ...] = ()
    """What belongs to it beside its nodes."""
    exclusive: frozenset[str] = frozenset()
    """Of its hardware, what no other device of the same resource may have at a time."""
    parts: tuple[frozenset[str], ...] = ()
    """Its hardware, or of what it depends on, where it can do with some of it (a pool): unhealthy once all parts are,
    degraded while some are."""
    numa_node: int | None = None
    """None where the kernel says -1 or nothing (kubelet contract: A5)."""
    ancestry: tuple[str, ...] = ()
    """Its PCI bridges, from the root."""
    unusable: str = ""
    """Why no resource can have it as it is, one sentence ("it has no driver"); it is shown as not offered, and the resource
    that might take it misses it."""
    by_design: bool = False
    """Of an unusable device: whether it is as it should be (another adapter's port, an interface of the host). Then it
    is shown, and no resource misses it."""
    no_reset: str = ""
    """Why no resource with `pre_start = "reset"` can have it, one sentence; may be empty where none is configured."""
    attributes: Mapping[str, tuple[str, ...]] = {}
    """What selectors match, templates make names of, and `explain` prints."""


class Link(Struct, frozen=True):
    """A connection between two pieces of hardware that a backend knows (NVLink, XGMI), with its weight."""

    one: str
    """As in `Device.hardware` or `depends`: `pci:0000:3b:00.0`. So for the parts of a GPU, too."""
    other: str
    weight: int
    """How many links there are."""


class Problem(Struct, frozen=True):
    """Something an operator should know: about what, and one sentence."""

    subject: str
    sentence: str
    resource: str = ""
    """The resource that gets no device for it, or fewer; empty: any that would take the hardware, or none."""


class Discovery(Struct, frozen=True, gc=False):
    """What one look at one unit found."""

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    problems: tuple[Problem, ...] = ()
    beside: tuple[Device, ...] = ()
    """Devices that are there and that no list shows, selected or not. They are named where a selector matches nothing, and
    explained if asked for."""
    settles: float = 0.0
    """Seconds after which the unit is to be looked at again, though no event comes: it may lack something, but only for now.
    0: it lacks nothing, or what it lacks is a problem."""


class Verdict(enum.Enum):
    """What a signal means for the hardware it is about."""

    NOW = "now"  # proof: unhealthy at once
    DELAYED = "delayed"  # may be transient: unhealthy once it has lasted `after` seconds
    DEGRADED = "degraded"  # still offered; shown with its reason
    INFO = "info"  # shown only
    NOTE = "note"  # it happened, and is over: told as an event, in the history and by `explain`; changes no health
    FINE = "fine"  # explicitly good; from a record, with `clears_on`: that has happened, latched signals end


class Clears(enum.Enum):
    """What ends a latched signal."""

    REBIND = "rebind"
    RECOVERED = "recovered"
    OUR_RESET = "our-reset"
    BOOT = "boot"
    OPERATOR = "operator"


class Trend(enum.Enum):
    """How a number has to change for its signal to count."""

    RISES = "rises"  # it is higher than when it was last looked at
    BELOW_BEST = "below-best"  # it is lower than it has been


class Measure(Struct, frozen=True):
    """A number behind a signal. Health compares it with what it was, since a backend keeps nothing."""

    name: str
    """Tells it from the other numbers of the same hardware: `port 1 symbol_error`."""
    value: int
    trend: Trend


class Signal(Struct, frozen=True, gc=False):
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
    """Of a signal from a record: what ends it. Of a FINE one: what has happened."""
    measure: Measure | None = None
    """The signal counts only where this number does what its `trend` says (and `recover_after` seconds longer).
    The message must not hold the number: every other message is a change, and a list to the kubelet."""
    unless_held: bool = False
    """It does not count while a pod holds the hardware: an HCA that went into the pod's network namespace."""
    pid: int | None = None
    """The process that it is about, in the host's PID namespace: it leads to a pod."""
    process: str = ""
    """That process's name, which its user chose."""
    fault: str = ""
    """Of a record's signal: what happened, in the same words from every source. Two sources that tell it within 10 s
    tell of one fault. Empty: no other source tells of it."""


class Uevent(Struct, frozen=True):
    """A kernel object event: a hint where to look, never a fact (sysfs is the truth)."""

    action: str
    subsystem: str
    devpath: str
    """Below /sys, starting with `/devices/`."""
    node: HostPath | None = None
    """The device node the event names (DEVNAME)."""
    properties: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        """The device's own name in sysfs, the last part of `devpath`: `ptp0`, `0000:3b:00.0`."""
        return self.devpath.rpartition("/")[2]


class PathChange(Struct, frozen=True):
    """An entry of a watched directory appeared, vanished or changed."""

    path: HostPath


class LinkChange(Struct, frozen=True):
    """A network interface appeared, vanished, went up or down (rtnetlink RTM_NEWLINK and RTM_DELLINK)."""

    name: str
    """IFLA_IFNAME: `ib0`, `eth3`."""
    index: int


Hint = Uevent | PathChange | LinkChange


_BEFORE: Final = re.compile(r"[^\s:]+ ([^\s]+): ")
"""What dev_printk puts before a driver's message (dev_printk_emit, drivers/base/core.c): `<driver> <device>: `."""


class Record(Struct, frozen=True):
    """A fact from the kernel that sysfs does not keep (an XID line, WEDGED)."""

    source: str
    """`kmsg`: a line of the kernel's log; `uevent`: an event with one of the wanted `Watches.facts`; else `Heard.source`."""
    boot: str
    """/proc/sys/kernel/random/boot_id; with `sequence` it tells a record from all others."""
    sequence: int
    """The line's number in the kernel's log, or the event's SEQNUM; of what `Backend.listen` heard, microseconds since boot."""
    time: float
    """Seconds since boot, as the kernel stamped it; of an event, when it was received."""
    text: str
    """The line; of an event, its DEVPATH; `Heard.text`."""
    properties: Mapping[str, str] = {}
    """Of an event; of a line, what the kernel says it is about: SUBSYSTEM, DEVICE."""

    @property
    def device(self) -> str:
        """Of a line: the name of the device that the kernel says it is about, `0000:3b:00.0`; empty if it names none.

        It is in the tags of the record, which no text in a line can forge (Documentation/ABI/testing/dev-kmsg).
        """
        subsystem, tag = self.properties.get("SUBSYSTEM", ""), self.properties.get("DEVICE", "")
        return tag.removeprefix(f"+{subsystem}:") if subsystem and tag.startswith(f"+{subsystem}:") else ""

    @property
    def message(self) -> str:
        """Of a line: the driver's own words, without the driver and device before them.

        Many lines quote what users choose: mount options, names of USB devices and of processes. So only the beginning of
        these words proves that a driver wrote them.
        """
        device = self.device
        found = _BEFORE.match(self.text) if device else None
        return self.text[found.end() :] if found is not None and found[1] == device else self.text


class Heard(Struct, frozen=True):
    """What `Backend.listen` heard; it becomes a `Record`."""

    source: str
    """Names the witness, as `Record.source`: `nvml`. The same for ever; neither `kmsg` nor `uevent`."""
    text: str
    """What it said."""
    properties: Mapping[str, str] = {}


PLACEHOLDER: Final = re.compile(r"\{([^{}\s]+)\}")
"""An attribute in a resource's name, which makes it a template."""

Placement = Literal["spread", "pack"]
PreStart = Literal["none", "check", "reset"]
Edits = Literal["inline", "cdi", "both"]
Adopt = Literal["lenient", "strict"]
Serve = Literal["device-plugin", "dra"]

Options = TypeVar("Options", bound=msgspec.Struct)


class ResourceSpec(Struct, Generic[Options], frozen=True):
    """How one resource is made: which backend, which hardware, with which options."""

    backend: str
    options: Options
    select: tuple[Selector, ...] = ()
    """Any of them takes a device; none written takes every device of the backend."""
    exclude: tuple[Selector, ...] = ()
    replicas: int = 1
    """How many pods may share one device."""
    placement: Placement = "spread"
    """Where several share: on the device with the most free replicas, or with the fewest."""
    pre_start: PreStart = "none"
    """What is done before a container starts: nothing; refuse hardware that is unhealthy now; also reset it."""
    edits: Edits = "inline"
    """How a container gets nodes and mounts: from the kubelet, by CDI from the container runtime, or both ways."""
    adopt: Adopt = "lenient"
    """What becomes of free devices while a pod holds some of the resource that are mapped to none: they are offered, or
    none is ("strict")."""
    serve: Serve = "device-plugin"
    """By which of the kubelet's APIs pods get it: never by both."""


_MADE_UNDERSCORES: Final = str.maketrans("/.", "__")


class Resource(Struct, Generic[Options], frozen=True):
    """A resource name and its spec."""

    name: str
    """What pods ask for; where a backend is made, it may be a template, as in `nvidia.com/mig-{profile}`."""
    spec: ResourceSpec[Options]
    template: str = ""
    """The template that gave the name, if one did."""

    @property
    def configured(self) -> str:
        """The name as configured: what `Backend.resources` and `Device.resource` have."""
        return self.template or self.name

    @property
    def named_by(self) -> tuple[str, ...]:
        """The attributes that a template asks for, each once; none of any other name."""
        return tuple(dict.fromkeys(PLACEHOLDER.findall(self.name)))

    @property
    def asks_for(self) -> frozenset[str]:
        """The attributes that its selectors and its name ask for: what costs much is read only for who asks."""
        return frozenset(
            (*self.named_by, *(name for table in (*self.spec.select, *self.spec.exclude) for name in table))
        )

    @property
    def is_template(self) -> bool:
        """Whether it stands for a resource for each value of an attribute."""
        return PLACEHOLDER.search(self.name) is not None

    def variable(self, prefix: str) -> str:
        """The variable with the devices that a pod has of it: `PCI_RESOURCE_NVIDIA_COM_TU104GL-T4`, as KubeVirt's.

        The name is in upper case, with `_` for `/` and `.`; a `-` stays (ResourceNameToEnvVar in KubeVirt's pkg/util;
        sriov-network-device-plugin makes the name in the same way).
        """
        return f"{prefix}_{self.name.upper().translate(_MADE_UNDERSCORES)}"

    def refuses(self, device: Device) -> str | None:
        """Why this resource's selectors do not take the device, or None if they do."""
        for selector in self.spec.exclude:
            if mismatch(selector, device.attributes) is None:
                return "it is excluded by " + " and ".join(f"{k} = {' or '.join(v)}" for k, v in selector.items())
        reasons = [mismatch(selector, device.attributes) for selector in self.spec.select]
        if not reasons or None in reasons:
            return None
        return "; ".join(reason for reason in reasons if reason)

    def might_take(self, device: Device) -> bool:
        """Whether its selectors take the device, as far as its attributes are known; an unusable one lacks some."""
        told = device.attributes
        if any(mismatch(selector, told) is None for selector in self.spec.exclude):
            return False
        known = ({name: it for name, it in selector.items() if told.get(name)} for selector in self.spec.select)
        return not self.spec.select or any(mismatch(selector, told) is None for selector in known)


class Grant(Struct, frozen=True):
    """One ID that a pod asked for, with the device behind it."""

    id: str
    device: Device


class Released(Struct, frozen=True):
    """One ID that no pod holds any more. Neither its resource nor its device need exist by now."""

    resource: str
    id: str
    hardware: frozenset[str]


class ContainerEdits(Struct, frozen=True):
    """What a container gets with the devices it was given."""

    nodes: tuple[Node, ...] = ()
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    cdi_devices: tuple[str, ...] = ()

    @classmethod
    def of(cls, grants: Iterable[Grant]) -> ContainerEdits:
        """The nodes and mounts of the granted devices, each once, however many tokens of a device were granted."""
        devices = [grant.device for grant in grants]
        nodes = (node for device in devices for node in device.nodes)
        return cls(
            nodes=tuple({(node.path, node.container_path, node.permissions): node for node in nodes}.values()),
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


class Watches(Struct, frozen=True):
    """What a backend asks the sources to listen to."""

    subsystems: frozenset[str] = frozenset()
    """Of uevents; `ANY_SUBSYSTEM` for all of them."""
    directories: frozenset[HostPath] = frozenset()
    """Whose entries' coming and going is told; they need not exist yet. A directory itself is told when it
    begins to be watched (look at what is in it then), appears or vanishes."""

    facts: frozenset[str] = frozenset()
    """Properties that make an event of the wanted subsystems a `Record` too: ERROR_EVENT, WEDGED."""
    kernel_lines: frozenset[str] = frozenset()
    """A line of the kernel's log that begins with any of these becomes a `Record`."""
    links: bool = False
    """Network interfaces, as `LinkChange`s."""
    listen: frozenset[str] = frozenset()
    """Hardware that `Backend.listen` is to hear now."""
    listen_without_log: frozenset[str] = frozenset()
    """The same, only while the kernel's log cannot be read."""
    poll: float | None = None
    """Seconds between two glances at all known devices (`Backend.glance`), for what the kernel sends no event of;
    None: a probe each `agent.probe` is often enough."""

    def __or__(self, other: Watches) -> Watches:
        """What both ask the sources for. `poll` is left out: it is about one backend alone."""
        return Watches(
            self.subsystems | other.subsystems,
            self.directories | other.directories,
            self.facts | other.facts,
            self.kernel_lines | other.kernel_lines,
            self.links or other.links,
        )


ANY_SUBSYSTEM: Final = "*"


class All(enum.Enum):
    """Stands for every unit of a backend."""

    ALL = "all"


ALL: Final = All.ALL


# --- what the last look found ---


class Known(dict[str, tuple[Device, ...]]):
    """Unit → its devices, with an index from hardware to units. Discovery writes it, by `[…] =` and `del` alone.

    `Backend.affects` and `watches` are asked at every event on the node: the way from hardware to units must not be a search.
    """

    __slots__ = ("_minding", "_same_by_key")

    def __init__(self, units: Mapping[str, tuple[Device, ...]] | None = None) -> None:
        super().__init__()
        self._minding: dict[str, tuple[str, ...]] = {}
        self._same_by_key: dict[str, None] = {}
        for unit, devices in (units or {}).items():
            self[unit] = devices

    def copy(self) -> Known:
        """Its own copy, to go on from."""
        other = Known()
        dict.update(other, self)
        other._minding = self._minding.copy()
        other._same_by_key = self._same_by_key.copy()
        return other

    def minding(self, hardware: str) -> tuple[str, ...]:
        """The units with a device that owns this hardware or depends on it."""
        return self._minding.get(hardware, ())

    def same_by_key(self) -> Set[str]:
        """The units with a device whose identity is its key: it stays the same whatever it is made of."""
        return self._same_by_key.keys()

    def having_node(self, path: HostPath) -> list[str]:
        """The units with a device that has this node, or has one in this directory."""
        return [
            unit
            for unit, devices in self.items()
            if any(node.path == path or node.path.parent == path for device in devices for node in device.nodes)
        ]

    def __setitem__(self, unit: str, devices: tuple[Device, ...]) -> None:
        before, after = minded(self.get(unit, ())), minded(devices)
        super().__setitem__(unit, devices)
        for hardware in before - after:
            self._forget(unit, hardware)
        for hardware in after - before:
            self._minding[hardware] = (*self._minding.get(hardware, ()), unit)
        if any(device.identity == device.key for device in devices):
            self._same_by_key[unit] = None
        else:
            self._same_by_key.pop(unit, None)

    def __delitem__(self, unit: str) -> None:
        for hardware in minded(self[unit]):
            self._forget(unit, hardware)
        self._same_by_key.pop(unit, None)
        super().__delitem__(unit)

    pop = popitem = setdefault = update = clear = None  # type: ignore[assignment]  # they would pass by the index

    def _forget(self, unit: str, hardware: str) -> None:
        if others := tuple(other for other in self._minding[hardware] if other != unit):
            self._minding[hardware] = others
        else:
            del self._minding[hardware]


def minded(devices: Iterable[Device]) -> frozenset[str]:
    """The hardware that these devices own or depend on."""
    return frozenset[str]().union(*(device.hardware | device.depends for device in devices))
