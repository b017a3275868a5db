"""What each way of finding device nodes does, for its own groups of a resource; and what they share: paths, globs, nodes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import ClassVar, Final, Generic, TypeVar

from msgspec import Struct

from backends.base import (
    NUMBER,
    TEXT,
    All,
    Attribute,
    Device,
    Discovery,
    Hint,
    Host,
    HostPath,
    Known,
    Node,
    Signal,
    Verdict,
    Watches,
    one_of,
)
from backends.chardev.options import CharDevResource, GroupOptions, PathOption
from backends.errors import printable
from backends.linux.globs import Glob, is_glob
from backends.linux.nodes import DeviceNode, Fault, NoNodeError, device_node
from backends.linux.sysfs import KernelNode

# --- groups of a resource ---


class Group(Struct, frozen=True, eq=False):
    """One group; a resource without `groups` is one."""

    resource: str
    options: GroupOptions
    number: int = 0
    """From 1, as the config lists them; 0 of a resource without `groups`."""
    attributes: Mapping[str, tuple[str, ...]] = {}
    """What each of its devices has."""

    @property
    def name(self) -> str:
        """Its name among the groups of all resources."""
        return f"{self.resource}#{self.number}" if self.number else self.resource


def groups_of(resource: CharDevResource) -> tuple[Group, ...]:
    """A resource's groups in their order."""
    options = resource.spec.options
    if not options.groups:
        return (Group(resource.name, options),)
    return tuple(
        Group(resource.name, group, number, {"group": (str(number),)}) for number, group in enumerate(options.groups, 1)
    )


class Finder(ABC):
    """One way of finding devices. `backends.base.Backend` says what each method is for.

    A group belongs to one finder; a resource has as many as its groups have ways. `known` holds the units of all
    finders: those of this one start with `prefix`. What several of its groups of one resource take is the first one's;
    of what those of two finders take, the inventory offers one and tells the reason of the other.
    """

    prefix: ClassVar[str]

    @abstractmethod
    def __init__(self, host: Host, groups: Sequence[Group]) -> None:
        self.host = host

    @staticmethod
    def fixed_ids(group: Group) -> Iterable[str]:  # noqa: ARG004  # a default
        """As `Backend.fixed_ids`; by default none, since devices come and go."""
        return ()

    @abstractmethod
    def units(self) -> Iterable[str]:
        """As `Backend.units`."""

    @abstractmethod
    def discover(self, unit: str) -> Discovery:
        """As `Backend.discover`."""

    @abstractmethod
    def watches(self, known: Known) -> Watches:
        """As `Backend.watches`."""

    @abstractmethod
    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """As `Backend.affects`."""

    def probe(self, device: Device) -> Iterable[Signal]:
        """As `Backend.probe`; by default whether its nodes are there, and still the same."""
        return node_signals(self.host, device)

    @abstractmethod
    def ids(self, group: Group, device: Device) -> Sequence[str]:
        """As `Backend.ids`."""


# --- paths and globs, and what a container gets of the nodes that they lead to ---


MOST_MATCHES: Final = 16_384
"""Entries that the globs of all single nodes, or each glob of a bundle, may match; the first by name count."""

Taker = TypeVar("Taker")


class WantedPaths(Generic[Taker]):
    """Paths and globs, each with the group or unit that takes its matches. Asked for every event: a miss must be cheap."""

    def __init__(self, wanted: Iterable[tuple[PathOption, Taker]]) -> None:
        self.literals: dict[str, list[Taker]] = defaultdict(list)
        self.globs: list[tuple[Glob, Taker]] = []
        self.below: dict[str, dict[str, None]] = defaultdict(dict)
        """Directory → the paths without wildcards that lie in it or deeper."""
        self._ways: set[str] = set()  # the directories without a wildcard that globs lead through
        for option, taker in wanted:
            if is_glob(option.path):
                glob = Glob(option.path, files=option.type == "mount", pattern=option.pattern)
                self.globs.append((glob, taker))
                self._ways.update(_upwards(glob.fixed))
            else:
                self.literals[option.path].append(taker)
                for above in _upwards(HostPath(option.path).parent):
                    self.below[above][option.path] = None
        self._deep = [glob for glob, _ in self.globs if glob.deep]
        self._prefixes = tuple(glob.prefix for glob, _ in self.globs)
        self._deep_prefixes = tuple(glob.prefix for glob in self._deep)

    def takers(self, path: str) -> list[Taker]:
        """The takers of what lies at this path."""
        takers = [*self.literals.get(path, ())]
        if path.startswith(self._prefixes):
            takers += [taker for glob, taker in self.globs if glob.takes(path)]
        return takers

    def leads_through(self, path: str) -> bool:
        """Whether this path could be a directory on the way to what a glob takes."""
        return path in self._ways or (
            path.startswith(self._deep_prefixes) and any(glob.leads_through(path) for glob in self._deep)
        )

    def cannot_list(self, host: Host, directory: str) -> str | None:
        """Why a directory on the way to what globs take cannot be listed."""
        reasons = (
            glob.cannot_list(host, HostPath(directory)) for glob, _ in self.globs if glob.leads_through(directory)
        )
        return next(filter(None, reasons), None)

    def directories(self, listed: Iterable[str]) -> set[HostPath]:
        """The directories to watch; `listed` are paths among which are those that wildcards in directories matched."""
        directories = {HostPath(path).parent for path in self.literals} | {glob.fixed for glob, _ in self.globs}
        if self._deep:
            directories |= {HostPath(path) for path in set(listed) if path and self.leads_through(path)}
        return directories


def _upwards(directory: HostPath) -> Iterator[str]:
    yield directory.text
    while directory != (directory := directory.parent):
        yield directory.text


def first_matches(glob: Glob, host: Host, most: int) -> tuple[list[str], str]:
    """The first matches of a glob by name, `most` at most; and why there are no more, if there are."""
    unprintable: list[str] = []
    found = list(islice(glob.matches(host, unprintable.append), most + 1))
    whys = []
    if len(found) > most:
        whys.append(
            f"{glob.text} matches too much: there is room for {MOST_MATCHES:,} entries, and those after them, by name, are "
            "left out; write a narrower glob"
        )
    if unprintable:
        more = f" (and {len(unprintable) - 1} more)" if unprintable[1:] else ""
        whys.append(
            f"{glob.text} matches {printable(unprintable[0])}{more}, which is left out: a name that cannot be printed cannot "
            "be an ID; give it another one"
        )
    return found[:most], "; ".join(whys)


def default_permissions(host: Host) -> str:
    """As KubeVirt's plugin gives nodes: with cgroup v2 it adds mknod."""
    return "rwm" if os.path.exists(f"{host.sys}/fs/cgroup/cgroup.controllers") else "rw"  # noqa: PTH110  # see `numa_node`


def container_path(option: PathOption, path: HostPath) -> str:
    """Where a container finds what is at the host's `path`."""
    if option.mount_path is None:
        return path.text
    return option.mount_path + path.name if option.mount_path.endswith("/") else option.mount_path


def container_node(option: PathOption, path: HostPath, permissions: str) -> Node:
    """The node at `path` as the option gives it to a container, with these permissions by default."""
    return Node(path, container_path(option, path), option.permissions or permissions, option.shared)


NODE_ATTRIBUTES: Final[Mapping[str, Attribute]] = {
    **dict.fromkeys(("path", "name", "devname", "target"), TEXT),
    "type": one_of("block", "character"),
    "major": NUMBER,
    "minor": NUMBER,
}
"""Those of `node_attributes`."""


@lru_cache(maxsize=16)
def _first_such(values: tuple[str, ...]) -> tuple[str, ...]:
    """The same tuple for equal values: thousands of nodes in a row have the same type and major number."""
    return values


def node_attributes(members: Sequence[tuple[HostPath, DeviceNode]]) -> Mapping[str, tuple[str, ...]]:
    """The attributes of a device with these nodes: one value for each node, in the nodes' order."""
    attributes = {
        "path": tuple(path.text for path, _ in members),
        "name": tuple(path.name for path, _ in members),
        "devname": tuple(path.text.removeprefix("/dev/") for path, _ in members),
        "type": _first_such(tuple("block" if node.block else "character" for _, node in members)),
        "major": _first_such(tuple(str(node.major) for _, node in members)),
        "minor": tuple(str(node.minor) for _, node in members),
        "target": tuple(node.path.text for _, node in members if node.via),
    }
    return {name: values for name, values in attributes.items() if values}


def numbers(attributes: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The nodes' numbers, as `DeviceNode.number` writes them, from what `node_attributes` gave."""
    found = zip(*(attributes.get(name, ()) for name in ("type", "major", "minor")), strict=True)
    return [f"{kind[0]}:{major}:{minor}" for kind, major, minor in found]


def node_signal(host: Host, hardware: str, path: str, number: str) -> Signal | None:
    """What is wrong with `hardware`, whose node should be at `path` and have this number.

    Its `node-replaced` is of the node. The agent says the same of an ID whose pod was given another device's node.
    """
    try:
        node = device_node(host, HostPath(path))
    except NoNodeError as error:
        return Signal(hardware, _REASONS.get(error.fault, "node-replaced"), Verdict.NOW, error.sentence)
    if node.number == number:
        return None
    message = f"{path} is another device now: {node.number}, it was {number}"
    return Signal(hardware, "node-replaced", Verdict.NOW, message)


_REASONS: Final = {
    Fault.MISSING: "node-missing",
    Fault.DANGLING: "node-missing",
    Fault.UNREADABLE: "node-unreadable",
}


def tokens(key: str, count: int) -> tuple[str, ...]:
    """The IDs of a device named after a path: without /dev, and numbered where there are several."""
    name = key.removeprefix("/dev/")
    return (name,) if count == 1 else tuple(f"{name}::{n}" for n in range(count))


# --- nodes that the kernel names for a device ---


Member = tuple[HostPath, DeviceNode]


def member(host: Host, named: KernelNode) -> Member:
    """The node in /dev that the kernel has named.

    Raises:
        NoNodeError: it is not there, or is another.
    """
    node = device_node(host, named.path)
    if node.number != named.number:
        raise NoNodeError(Fault.OTHER, f"{named.path} is {node.number}, but the kernel says {named.number}")
    return named.path, node


def node_hardware(members: Iterable[Member]) -> frozenset[str]:
    """The hardware of a device with these nodes: no other resource may have a device with one of them."""
    return frozenset(f"node:{node.number}" for _, node in members)


def container_nodes(members: Sequence[Member], permissions: str, *, shared: bool = False) -> tuple[Node, ...]:
    """As a container gets them, at the host's paths."""
    return tuple(Node(path, path.text, permissions, shared) for path, _ in members)


def node_signals(host: Host, device: Device) -> Iterator[Signal]:
    """The signals of nodes that are missing or replaced, of a device with the attributes of `node_attributes`."""
    told = (device.attributes[name] for name in ("path", "type", "major", "minor"))
    for path, kind, major, minor in zip(*told, strict=True):
        number = f"{kind[0]}:{major}:{minor}"
        if signal := node_signal(host, f"node:{number}", path, number):
            yield signal
