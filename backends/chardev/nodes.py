"""Single nodes by path or glob; many tokens of one node where it can be shared.

A unit is the host path of a node. The IDs of a path are KubeVirt's, `kvm0`, `kvm1`, …; those of a glob are the
node's path below /dev as it is, slashes included: readable, and no two nodes share one (the kubelet takes any
string). Several tokens of a glob's node are told apart as `ttyUSB0::1`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

from backends.base import (
    ALL,
    ANY_SUBSYSTEM,
    All,
    Device,
    Discovery,
    Hint,
    Host,
    HostPath,
    Node,
    Problem,
    Signal,
    Uevent,
    Verdict,
    Watches,
)
from backends.chardev.options import CharDevResource, PathOption
from backends.known import Known
from backends.linux.globs import Glob, cannot_list, is_glob
from backends.linux.nodes import DeviceNode, Fault, NoNodeError, device_node, numa_node


class Nodes:
    """Finds the nodes that resources of one path each name."""

    prefix: ClassVar = "/"

    def __init__(self, host: Host, resources: Sequence[CharDevResource]) -> None:
        self.host = host
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

    @staticmethod
    def fixed_ids(resource: CharDevResource) -> Iterable[str]:
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
