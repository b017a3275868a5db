"""Finds single nodes by path or glob. A node that can be shared has several tokens; a directory of nodes is one device.

A unit is the host path of a node. The IDs of a resource's only path are KubeVirt's, `kvm0`, `kvm1`, …; those of a
glob are the node's path below /dev as it is, slashes included: readable, and no two nodes share one (the kubelet takes
any string). Several tokens of a glob's node are told apart as `ttyUSB0::1`. In `groups` a path's IDs are like a glob's:
KubeVirt's of /dev/a/x, /dev/b/x and of the node x0 would be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final

from msgspec.structs import replace

from backends.base import (
    ALL,
    ANY_SUBSYSTEM,
    All,
    Device,
    Discovery,
    Hint,
    Host,
    HostPath,
    PathChange,
    Problem,
    Signal,
    Uevent,
    Watches,
)
from backends.chardev.finder import (
    MOST_MATCHES,
    Finder,
    Group,
    WantedPaths,
    container_node,
    container_path,
    default_permissions,
    first_matches,
    node_attributes,
    node_hardware,
    node_signal,
    numbers,
    tokens,
)
from backends.interface.values import Known
from backends.linux.globs import is_glob
from backends.linux.nodes import (
    DeviceNode,
    Fault,
    NoNodeError,
    behind,
    device_node,
    directory,
    links_to_file,
    nodes_below,
    numa_node,
)

_NONE: Final = frozenset[str]()  # one for all: each takes 216 bytes


class Nodes(Finder):
    """Finds the nodes of groups of one path each."""

    prefix: ClassVar = "/"

    def __init__(self, host: Host, groups: Sequence[Group]) -> None:
        super().__init__(host, groups)
        self._wanted = WantedPaths((group.options.paths[0], group) for group in groups)
        self._globs = frozenset(glob.text for glob, _ in self._wanted.globs)
        self._permissions = default_permissions(host)

    @staticmethod
    def fixed_ids(group: Group) -> Iterable[str]:
        """The tokens of a path; those of a glob's matches are not fixed."""
        path = group.options.paths[0].path
        return () if is_glob(path) else _ids(group, path)

    def units(self) -> Iterable[str]:
        """Every path, existing or not, what the globs match (see `Glob.matches`), and each glob of which matches are left out."""
        units, curtailed = self._listed()
        return (*units, *curtailed)

    def _listed(self) -> tuple[Iterable[str], Mapping[str, str]]:
        """The paths, and the globs of which matches are left out, each with why."""
        paths, curtailed = dict.fromkeys(self._wanted.literals), dict[str, str]()
        for glob, _ in self._wanted.globs:
            matches, why = first_matches(glob, self.host, max(0, MOST_MATCHES - len(paths)))
            paths.update(dict.fromkeys(matches))
            if why:
                curtailed[glob.text] = why
        return paths, curtailed

    def discover(self, unit: str) -> Discovery:
        """One device for each resource that takes the node, in the first of its groups that does.

        A named path that leads to no node is a problem. Of a glob, no match is missed, nor a directory without nodes.
        """
        if not (takers := _first_of_each(self._wanted.takers(unit))):
            return Discovery(problems=tuple(self._complaints(unit)))
        try:
            node = device_node(self.host, HostPath(unit))
        except NoNodeError as error:
            problems = list(self._complaints(unit))
            if error.fault is Fault.DIRECTORY:
                return self._directory(unit, takers, problems)
            if self._is_missed(unit, error.fault):
                problems.append(Problem(unit, error.sentence))
            return Discovery(problems=tuple(problems))
        if node.path.text != unit:  # an alias; a resource that takes the node under its own name has it once
            others = {taker.resource for taker in self._wanted.takers(node.path.text)}
            takers = [group for group in takers if group.resource not in others]
        numa = numa_node(self.host, node)
        devices = tuple(self._device(group, unit, node, numa) for group in takers)
        return Discovery(devices, problems=tuple(self._complaints(unit)) if unit in self._globs else ())

    def _directory(self, unit: str, takers: Iterable[Group], problems: list[Problem]) -> Discovery:
        """One device for each of these; a resource that takes the directory under its own name has it once."""
        try:
            real = directory(self.host, HostPath(unit))
            if real is not None and real.text != unit:
                others = {taker.resource for taker in self._wanted.takers(real.text)}
                takers = [group for group in takers if group.resource not in others]
            devices = tuple(whole_directory(self.host, group, unit, self._permissions) for group in takers)
        except NoNodeError as error:
            if unit in self._wanted.literals or error.fault is not Fault.DIRECTORY:  # /dev/input/* takes by-id, too
                problems.append(Problem(unit, error.sentence))
            return Discovery(problems=tuple(problems))
        return Discovery(devices, problems=tuple(problems))

    def _complaints(self, unit: str) -> Iterator[Problem]:
        """The problem of a directory on the way to a glob's matches, and of a glob of which matches are left out."""
        if self._wanted.leads_through(unit) and (why := self._wanted.cannot_list(self.host, unit)):
            yield Problem(unit, why)
        if unit in self._globs and (why := self._listed()[1].get(unit)):
            yield Problem(unit, why)

    def _is_missed(self, unit: str, fault: Fault) -> bool:
        """Whether it is a problem that there is no node at this path."""
        named = self._wanted.literals.get(unit, ())
        return fault is not Fault.MISSING or not all(group.options.paths[0].optional for group in named)

    def _device(self, group: Group, unit: str, node: DeviceNode, numa: int | None) -> Device:
        option = group.options.paths[0]
        path = HostPath(unit)
        number = frozenset({f"node:{node.number}"})
        hardware = frozenset({f"shared:{group.resource}/{node.number}"}) if option.shared else number
        links = frozenset(f"path:{target}" for target in node.via) or _NONE
        stands_for = behind(self.host, node)
        return Device(
            key=unit,
            unit=unit,
            resource=group.resource,
            hardware=hardware,
            exclusive=hardware,
            depends=links | number if option.shared else links,
            identity=stands_for.identity or node.number,
            aliases=frozenset((node.number,)) if stands_for.identity else _NONE,
            place=stands_for.place or _NONE,
            nodes=(container_node(option, path, self._permissions),),
            numa_node=numa,
            attributes={**node_attributes([(path, node)]), **group.attributes},
        )

    def ids(self, group: Group, device: Device) -> Sequence[str]:
        """The tokens of the node (see the module)."""
        return _ids(group, device.key)

    def watches(self, known: Known) -> Watches:
        """All uevents, and the directories of all paths, since nodes and links are also made by hand or by udev."""
        devices = (device for unit in known.same_by_key() for device in known[unit])
        whole = {path for device in devices for path in directories_in(device)}
        directories = self._wanted.directories(_may_be_directories(known)) | whole
        return Watches(frozenset({ANY_SUBSYSTEM}), frozenset(directories))

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """The path itself, if a resource takes it; the links that lead to it; directories above it that are devices.

        Where the path is a directory, also the paths below it. `change` events are passed over: a node stays what it is,
        and each virtual machine causes two on kvm.
        """
        if isinstance(hint, PathChange):
            path = hint.path.text
            if self._wanted.leads_through(path):
                return ALL
            below = self._wanted.below.get(path, ())
        elif not isinstance(hint, Uevent) or hint.node is None or hint.action == "change":
            return ()
        else:
            path, below = hint.node.text, ()
        links = [*known.minding(f"path:{path}")]
        above = path
        while (above := above.rpartition("/")[0]) not in ("", "/dev"):
            links += (*known.minding(f"path:{above}"), *([above] if self._wanted.takers(above) else ()))
        if not path.isprintable():
            return (*below, *links, *self._globs)
        if not self._wanted.takers(path):
            return (*below, *links)
        if path not in known and len(known) >= MOST_MATCHES:  # once this is a problem, only full scans help
            return (*below, *links) if any(glob in known for glob in self._globs) else ALL
        return (*below, path, *links)

    def probe(self, device: Device) -> Iterable[Signal]:
        """Signals unless the node is there, and still the same. The same of each node of a directory."""
        hardware = min(device.hardware)  # the one that it has, or the directory itself
        for node, number in zip(device.nodes, numbers(device.attributes), strict=True):
            if signal := node_signal(self.host, hardware, node.path.text, number):
                yield signal


def _first_of_each(takers: Iterable[Group]) -> list[Group]:
    """Of each resource the first group."""
    first: dict[str, Group] = {}
    for group in sorted(takers, key=lambda group: group.number):
        first.setdefault(group.resource, group)
    return list(first.values())


def _ids(group: Group, path: str) -> tuple[str, ...]:
    count = group.options.count
    if group.number or is_glob(group.options.paths[0].path):
        return tokens(path, count)
    name = HostPath(path).name
    return tuple(f"{name}{n}" for n in range(count))


# --- one device of a directory such as /dev/snd: of every node below it ---
#
# What is plugged in later joins the device, which stays the same to a pod that has it: only new pods get the new
# nodes.


def whole_directory(host: Host, group: Group, unit: str, permissions: str) -> Device:
    """The device that the directory at the path `unit` is; its nodes have these permissions by default.

    Raises:
        NoNodeError: it cannot be listed, or has no node.
    """
    path = HostPath(unit)
    found = nodes_below(host, path, MOST_MATCHES)
    if not found:
        raise NoNodeError(Fault.DIRECTORY, f"{path} is a directory with no device node below it")
    option = group.options.paths[0]
    inside = container_path(option, path)
    own = node_hardware(found)
    hardware = frozenset({f"shared:{group.resource}{path}"}) if option.shared else own | {f"directory:{path}"}
    links = frozenset(f"path:{target}" for target in links_to_file(host, path))
    numa_nodes = {numa_node(host, node) for _, node in found} - {None}
    nodes = [(container_node(option, each, permissions), each.text.removeprefix(unit)) for each, _ in found]
    return Device(
        key=unit,
        unit=unit,
        resource=group.resource,
        hardware=hardware,
        exclusive=hardware,
        depends=links | own if option.shared else links,
        identity=unit,
        nodes=tuple(replace(node, container_path=inside + below) for node, below in nodes),
        numa_node=numa_nodes.pop() if len(numa_nodes) == 1 else None,
        attributes={**node_attributes(found), "path": (unit,), "name": (path.name,), **group.attributes},
    )


def _may_be_directories(known: Known) -> Iterator[str]:
    """Of all paths those that may be a directory, or have one above them that a wildcard matched: no node is one."""
    yield from {unit.rpartition("/")[0] for unit in known}
    yield from known.same_by_key()
    yield from (unit for unit, devices in known.items() if not devices)


def directories_in(device: Device) -> set[HostPath]:
    """The directories to watch for such a device: itself, and those of its nodes."""
    return {HostPath(device.key), *(node.path.parent for node in device.nodes)}
