"""Keeps the paths and globs of groups, and says what a container gets of the nodes that they lead to."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final, Generic, TypeVar

from backends.base import NUMBER, TEXT, Attribute, Host, HostPath, Node, Signal, Verdict, one_of
from backends.chardev.options import PathOption
from backends.errors import printable
from backends.linux.globs import Glob, is_glob
from backends.linux.nodes import DeviceNode, Fault, NoNodeError, device_node

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
        """Could this path be a directory on the way to what a glob takes?"""
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


ATTRIBUTES: Final[Mapping[str, Attribute]] = {
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
    """What is wrong with `hardware`, whose node should be at `path` and have this number."""
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
