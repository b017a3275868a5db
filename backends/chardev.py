"""Device nodes, character and block, by path or glob; many tokens of one node where it can be shared.

A unit is the host path of a node. The IDs of a path are KubeVirt's, `kvm0`, `kvm1`, …; those of a glob are the
node's path below /dev as it is, slashes included: readable, and no two nodes share one (the kubelet takes any
string). Several tokens of a glob's node are told apart as `ttyUSB0::1`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

import msgspec

from backends.base import (
    ALL,
    ANY_SUBSYSTEM,
    All,
    AllocationRefused,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    Host,
    HostPath,
    Node,
    OptionsError,
    Problem,
    Resource,
    Signal,
    Uevent,
    Verdict,
    Watches,
)
from backends.known import Known
from backends.linux.globs import Glob, cannot_list, is_glob
from backends.linux.nodes import DeviceNode, Fault, NoNodeError, device_node, numa_node

MOST_TOKENS: Final = 4 * 1024 * 1024 // 16
"""No kubelet accepts a list of more: it reads 4 MiB (kubelet contract: A1), and a slot takes 16 bytes or more."""


class PathOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which nodes, and how a container gets them."""

    path: str
    """On the host, below /dev; may be a glob."""
    permissions: str | None = None
    """Of r, w, m; by default KubeVirt's: "rw" on a host with cgroup v1, "rwm" with v2."""
    mount_path: str | None = None
    """The path in the container, by default the host's; after a trailing "/" comes the node's own name."""


class CharDevOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a `chardev` resource."""

    paths: list[PathOption]
    count: int = 1
    """Tokens: how many containers may have one node at a time."""


CharDevResource = Resource[CharDevOptions]


class CharDev(Backend[CharDevOptions]):
    """Hands out nodes of /dev."""

    options_type: ClassVar = CharDevOptions

    def __init__(self, host: Host, resources: Sequence[CharDevResource]) -> None:
        super().__init__(host, resources)
        self._literals: dict[str, list[CharDevResource]] = defaultdict(list)
        self._above: dict[str, set[str]] = defaultdict(set)  # directory → the literal paths below it
        self._globs: list[tuple[Glob, CharDevResource]] = []
        for resource in resources:
            for option in resource.spec.options.paths:
                self._add(option.path, resource)

    def _add(self, path: str, resource: CharDevResource) -> None:
        if is_glob(path):
            self._globs.append((Glob(path), resource))
            return
        self._literals[path].append(resource)
        above = HostPath(path)
        while above != (above := above.parent):
            self._above[above.text].add(path)

    @classmethod
    def check(cls, resource: CharDevResource) -> None:
        """Refuse what no node could make right.

        Raises:
            OptionsError: with the offending key and a sentence.
        """
        options = resource.spec.options
        if len(options.paths) != 1:
            sentence = (
                "has no path; name one" if not options.paths else "names several paths; bundles are not there yet"
            )
            raise OptionsError(("paths",), sentence)
        if not 1 <= options.count <= MOST_TOKENS:
            raise OptionsError(("count",), f"is {options.count}; it must be from 1 to {MOST_TOKENS}")
        if resource.spec.replicas != 1:
            raise OptionsError(("replicas",), "is not for device nodes; say count, the number of tokens of each node")
        for index, option in enumerate(options.paths):
            for key, why in _complaints(option):
                raise OptionsError(("paths", index, key), why)

    @classmethod
    def fixed_ids(cls, resource: CharDevResource) -> Iterable[str]:
        """The tokens of a path; what a glob matches is not fixed."""
        path = resource.spec.options.paths[0].path
        return () if is_glob(path) else _tokens(path, resource.spec.options.count)

    def units(self) -> Iterable[str]:
        """Every path, there or not, and what the globs match (see `Glob.matches`)."""
        matches = (match for glob, _ in self._globs for match in glob.matches(self.host))
        return dict.fromkeys((*self._literals, *matches))

    def discover(self, unit: str) -> Discovery:
        """One device for each resource that takes the node; what is no node is a problem.

        Not so for a glob: what it does not find is not missed, and directories are not meant by it.
        """
        problems = [Problem(unit, why) for why in self._unlistable(unit)]
        takers = self._takers(unit)
        if not takers:
            return Discovery(problems=tuple(problems))
        try:
            node = device_node(self.host, HostPath(unit))
        except NoNodeError as error:
            if unit in self._literals or error.fault not in (Fault.MISSING, Fault.DIRECTORY):
                problems.append(Problem(unit, error.sentence))
            return Discovery(problems=tuple(problems))
        numa = numa_node(self.host, node)
        return Discovery(
            tuple(
                self._device(resource, unit, node, numa)
                for resource in takers
                if not self._has_own_name(resource, unit, node)
            )
        )

    def _takers(self, path: str) -> list[CharDevResource]:
        return [*self._literals.get(path, ()), *(resource for glob, resource in self._globs if glob.takes(path))]

    def _unlistable(self, unit: str) -> Iterator[str]:
        if any(glob.leads_through(unit) for glob, _ in self._globs) and (why := cannot_list(self.host, HostPath(unit))):
            yield why

    def _has_own_name(self, resource: CharDevResource, unit: str, node: DeviceNode) -> bool:
        """Is the path an alias of a node that the same resource takes under the node's own name?"""
        return node.path.text != unit and any(r is resource and glob.takes(node.path.text) for glob, r in self._globs)

    def _device(self, resource: CharDevResource, unit: str, node: DeviceNode, numa: int | None) -> Device:
        option = resource.spec.options.paths[0]
        path = HostPath(unit)
        attributes = {
            "path": (unit,),
            "name": (path.name,),
            "type": ("block" if node.block else "character",),
            "major": (str(node.major),),
            "minor": (str(node.minor),),
        }
        if node.via:
            attributes["target"] = (node.path.text,)
        return Device(
            key=unit,
            unit=unit,
            resource=resource.name,
            hardware=frozenset({f"node:{node.number}"}),
            depends=frozenset(f"path:{target}" for target in node.via),
            identity=node.number,
            nodes=(Node(path, _container_path(option, path), option.permissions or self._default_permissions()),),
            numa_node=numa,
            attributes=attributes,
        )

    def _default_permissions(self) -> str:
        """KubeVirt's: with cgroup v2 it adds mknod."""
        return "rwm" if self.host.sys.joinpath("fs/cgroup/cgroup.controllers").exists() else "rw"

    def ids(self, resource: CharDevResource, device: Device) -> Sequence[str]:
        """The tokens of the node (see the module)."""
        options = resource.spec.options
        if not is_glob(path := options.paths[0].path):
            return tuple(_tokens(path, options.count))
        name = device.key.removeprefix("/dev/")
        return (name,) if options.count == 1 else tuple(f"{name}::{n}" for n in range(options.count))

    def edits(self, resource: CharDevResource, grants: Sequence[Grant]) -> ContainerEdits:
        """Each node once, however many of its tokens were granted.

        Raises:
            AllocationRefused: two nodes would lie at the same path in the container.
        """
        nodes = tuple(dict.fromkeys(node for grant in grants for node in grant.device.nodes))
        if len({node.container_path for node in nodes}) < len(nodes):
            raise AllocationRefused(
                f"{resource.name} puts each device at {nodes[0].container_path}: a container can have only one of them"
            )
        return ContainerEdits(nodes=nodes)

    def watches(self, known: Known) -> Watches:
        """All uevents, and the directories of all paths, for nodes and links that are made by hand or by udev."""
        directories = {HostPath(path).parent for path in self._literals}
        for glob, _ in self._globs:
            directories.add(glob.fixed)
            if glob.deep:
                listed = {*known, *(unit.rpartition("/")[0] for unit in known)}
                directories |= {HostPath(path) for path in listed if path and glob.leads_through(path)}
        return Watches(frozenset({ANY_SUBSYSTEM}), frozenset(directories))

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """The path itself, if a resource takes it, and the links that lead to it; for a directory what is below.

        `change` events are passed over: a node stays what it is, and each virtual machine causes two on kvm.
        """
        if not isinstance(hint, Uevent):
            path = hint.path.text
            if any(glob.leads_through(path) for glob, _ in self._globs):
                return ALL
            below: Iterable[str] = self._above.get(path, ())
        elif hint.node is None or hint.action == "change":
            return ()
        else:
            path, below = hint.node.text, ()
        taken = path in self._literals or any(glob.takes(path) for glob, _ in self._globs)
        return (*below, *((path,) if taken else ()), *known.minding(f"path:{path}"))

    def probe(self, device: Device) -> Iterable[Signal]:
        """Is the node there, and still the same?"""
        (hardware,) = device.hardware
        try:
            node = device_node(self.host, HostPath(device.key))
        except NoNodeError as error:
            yield Signal(hardware, _REASONS.get(error.fault, "node-replaced"), Verdict.NOW, error.sentence)
            return
        if node.number != device.identity:
            message = f"{device.key} is another device now: {node.number}, it was {device.identity}"
            yield Signal(hardware, "node-replaced", Verdict.NOW, message)


_REASONS: Final = {
    Fault.MISSING: "node-missing",
    Fault.DANGLING: "node-missing",
    Fault.UNREADABLE: "node-unreadable",
}


def _tokens(path: str, count: int) -> Iterator[str]:
    name = HostPath(path).name
    return (f"{name}{n}" for n in range(count))


def _container_path(option: PathOption, path: HostPath) -> str:
    if option.mount_path is None:
        return path.text
    return option.mount_path + path.name if option.mount_path.endswith("/") else option.mount_path


def _complaints(option: PathOption) -> Iterator[tuple[str, str]]:
    """What is wrong with a path, key by key."""
    if why := _path_complaint(option.path):
        yield "path", why
    elif not option.path.startswith("/dev/"):
        yield "path", f"{option.path!r} is not below /dev, where the nodes are"
    elif option.path.endswith("/"):
        yield "path", f"{option.path!r} is a directory; name a node in it, or {option.path + '*'!r} for all of them"
    elif "**" in option.path:
        yield "path", f"{option.path!r} has '**'; write one '*' for each directory between"
    if option.permissions is not None and (why := _permissions_complaint(option.permissions)):
        yield "permissions", why
    if option.mount_path is not None and (why := _path_complaint(option.mount_path)):
        yield "mount_path", why


def _path_complaint(path: str) -> str | None:
    if not path.startswith("/"):
        return f"{path!r} is not an absolute path"
    if not path.isprintable():
        return f"{path!r} has a character that cannot be printed"
    parts = path.rstrip("/").split("/")[1:]
    if ".." in parts or "." in parts:
        return f"{path!r} has '..' or '.' in it; write the path straight"
    if "" in parts or path.endswith("//"):
        return f"{path!r} has an empty name between two slashes"
    return None


def _permissions_complaint(permissions: str) -> str | None:
    if not permissions:
        return "is empty; write one or more of r, w, m, or leave it out"
    if unknown := sorted(set(permissions) - set("rwm")):
        return f"{permissions!r} has {', '.join(map(repr, unknown))}; only r (read), w (write), m (mknod) are known"
    if len(set(permissions)) < len(permissions):
        return f"{permissions!r} has a letter twice"
    return None
