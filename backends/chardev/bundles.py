"""Bundles: devices of several nodes and mounts, one of each path of a group.

A unit is a group, `bundle:<resource>`, since one node more or less may move all pairs (see `pair`). The directories
that wildcards match are units too, `bundle:/dev/…`, so that they are watched. A bundle's ID is the path below /dev of the
node that only it has, so that it does not depend on other bundles. If its other members change, its identity does: a pod
that holds the ID keeps it, as one whose device was replaced.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import ClassVar, Final, Generic, TypeAlias, TypeVar

from msgspec import Struct
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
    Known,
    Mount,
    Node,
    PathChange,
    Problem,
    Signal,
    Uevent,
    Verdict,
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
    node_signal,
    numbers,
    tokens,
)
from backends.chardev.options import PathOption
from backends.linux.globs import Glob, is_glob
from backends.linux.nodes import Behind, DeviceNode, Fault, NoNodeError, behind, device_node, links_to_file, numa_node

# --- how bundles are put together: generic-device-plugin's rule, and their names ---
#
# Each path's matches are sorted, and the list of them is repeated `limit` times; the n-th bundle takes the n-th entry
# of every path. There are as many bundles as the path with the most matches has matches, but no more than the
# shortest of the repeated lists has entries. Paths that are optional and match nothing do not count; a required one
# leaves no bundle.

Match = TypeVar("Match", bound=Hashable)


class Matches(Struct, Generic[Match], frozen=True):
    """What one path of a bundle matches, sorted."""

    found: Sequence[Match]
    limit: int = 1
    optional: bool = False


class Bundle(Struct, Generic[Match], frozen=True):
    """One match of every path; None where an optional path has none."""

    members: tuple[Match | None, ...]
    named: tuple[int, ...]
    """The paths whose matches tell this bundle from all others."""


def pair(paths: Sequence[Matches[Match]], names: Sequence[int]) -> list[Bundle[Match]]:
    """The bundles that these matches make.

    A bundle is named after the match that no other bundle has, so that it keeps its name whatever happens to other
    matches: that of the first path of `names` (an order of preference) whose matches are not repeated. Where all
    are, it is named after all that it holds, which no other does: the path with the most matches repeats none.
    """
    present = [path for path in paths if path.found or not path.optional]
    if not present:
        return []
    most = max(len(path.found) for path in present)
    length = min(most, *(len(path.found) * path.limit for path in present))
    sole = next(((k,) for k in names if paths[k].found and paths[k].limit == 1), None)
    named = sole or tuple(k for k, path in enumerate(paths) if path.found)
    return [
        Bundle(tuple(path.found[n % len(path.found)] if path.found else None for path in paths), named)
        for n in range(length)
    ]


_TOLD: Final = 5  # of problems that are alike


class _Member(Struct, frozen=True):
    """What lies at a path of a bundle: a node, or else a file that is mounted."""

    path: HostPath
    node: DeviceNode | None
    via: frozenset[HostPath]
    behind: Behind = Behind()
    aliases: tuple[str, ...] = ()
    """Other names of the node that the same path matches."""

    def __str__(self) -> str:
        return f"{self.path} {self.node.number}" if self.node else str(self.path)

    @property
    def identity(self) -> str:
        """Its part of the bundle's identity; as a string, it is what older versions recorded."""
        return f"{self.path} {self.behind.identity}" if self.behind.identity else str(self)


_T = TypeVar("_T")
_Bundle: TypeAlias = Bundle[_Member]


class Bundles(Finder):
    """Finds the bundles of groups with several paths, or mounts."""

    prefix: ClassVar = "bundle:"

    def __init__(self, host: Host, groups: Sequence[Group]) -> None:
        super().__init__(host, groups)
        self._groups = {f"{self.prefix}{group.name}": group for group in groups}
        self._permissions = default_permissions(host)
        self._wanted = WantedPaths(
            (option, unit) for unit, group in self._groups.items() for option in group.options.paths
        )

    @staticmethod
    def fixed_ids(group: Group) -> Iterable[str]:
        """Those of a bundle that is named after a path without wildcards: there is at most one."""
        options = group.options
        sole = next((options.paths[k] for k in _preference(options.paths) if options.paths[k].limit == 1), None)
        if sole is None or sole.optional or is_glob(sole.path):
            return ()
        return tokens(sole.path, options.count)

    def units(self) -> Iterable[str]:
        """The groups, and the directories that wildcards match."""
        ways = (
            match
            for glob, _ in self._wanted.globs
            if glob.deep
            for match in first_matches(glob, self.host, MOST_MATCHES)[0]
        )
        return (
            *self._groups,
            *dict.fromkeys(f"{self.prefix}{way}" for way in ways if self._wanted.leads_through(way)),
        )

    def discover(self, unit: str) -> Discovery:
        """The group's bundles as they are paired now, and why there are no more."""
        if (group := self._groups.get(unit)) is None:
            return Discovery()
        options = group.options.paths
        looks = [self._look(option) for option in options]
        problems = [problem for _, problems in looks for problem in problems]
        paths = [
            Matches(found, option.limit, option.optional) for option, (found, _) in zip(options, looks, strict=True)
        ]
        bundles = pair(paths, _preference(options))
        problems += [Problem(group.name, why) for why in _shortage(options, paths, bundles)]
        devices = [self._device(group, unit, bundle) for bundle in bundles]
        collisions = {device.key: why for device in devices if (why := _collision(device))}
        problems += [Problem(key, f"the bundle {key} is not offered: {why}") for key, why in _first(collisions.items())]
        return Discovery(tuple(d for d in devices if d.key not in collisions), problems=tuple(problems))

    # --- what is there ---

    def _look(self, option: PathOption) -> tuple[list[_Member], list[Problem]]:
        """What one path matches, sorted, each node once; and what is wrong there."""
        if not is_glob(option.path):
            try:
                return [self._member(option, option.path)], []
            except NoNodeError as error:
                silent = option.optional and error.fault is Fault.MISSING
                return [], [] if silent else [Problem(option.path, error.sentence)]
        glob = Glob(option.path, files=option.type == "mount", pattern=option.pattern)
        matches, curtailed = first_matches(glob, self.host, MOST_MATCHES)
        problems = [Problem(glob.text, curtailed)] if curtailed else []
        members: list[_Member] = []
        wrong: list[Problem] = []
        directories: list[Problem] = []
        for match in matches:
            if not glob.takes(match):
                if why := glob.cannot_list(self.host, HostPath(match)):
                    problems.append(Problem(match, why))
                continue
            try:
                members.append(self._member(option, match))
            except NoNodeError as error:
                if error.fault is Fault.DIRECTORY:
                    directories.append(Problem(match, f"{error.sentence}; a bundle is made of nodes, name those in it"))
                elif error.fault is not Fault.MISSING:
                    wrong.append(Problem(match, error.sentence))
        wrong += [] if members else directories  # by-path beside the nodes of /dev/snd is none of its matches
        problems += _first(wrong)
        if len(wrong) > _TOLD:
            problems.append(Problem(glob.text, f"{glob.text} matches {len(wrong) - _TOLD:,} more like these"))
        return sorted(_once(members), key=lambda member: member.path), problems

    def _member(self, option: PathOption, path: str) -> _Member:
        """What is at this path.

        Raises:
            NoNodeError: nothing, or nothing that the option means.
        """
        if option.type == "mount":
            return _Member(HostPath(path), None, links_to_file(self.host, HostPath(path)))
        node = device_node(self.host, HostPath(path))
        return _Member(HostPath(path), node, node.via, behind(self.host, node))

    # --- bundles ---

    def _device(self, group: Group, unit: str, bundle: _Bundle) -> Device:
        options = group.options.paths
        key = "+".join(member.path.text for k in bundle.named if (member := bundle.members[k]))
        held = [(option, member) for option, member in zip(options, bundle.members, strict=True) if member]
        nodes = [(option, member.path, member.node) for option, member in held if member.node]
        mounts = [
            Mount(member.path, container_path(option, member.path), option.read_only)
            for option, member in held
            if member.node is None
        ]
        links = {f"path:{target}" for _, member in held for target in member.via}
        owned = frozenset(f"node:{node.number}" for option, _, node in nodes if not option.shared)
        identity, was = (" + ".join(told) for told in zip(*((one.identity, str(one)) for _, one in held), strict=True))
        return Device(
            key=key,
            unit=unit,
            resource=group.resource,
            hardware=owned | {f"{unit}/{key}"},
            exclusive=owned - {f"node:{node.number}" for option, _, node in nodes if option.limit > 1},
            depends=frozenset(links | {f"node:{node.number}" for option, _, node in nodes if option.shared}),
            identity=identity,
            aliases=frozenset({was} - {identity}),
            place=frozenset[str]().union(
                *(member.behind.place for option, member in held if option.limit == 1 and not option.shared)
            ),
            nodes=tuple(container_node(option, path, self._permissions) for option, path, _ in nodes),
            mounts=tuple(mounts),
            numa_node=self._numa_node([node for _, _, node in nodes]),
            attributes={**_attributes([member for _, member in held]), **group.attributes},
        )

    def _numa_node(self, nodes: Iterable[DeviceNode]) -> int | None:
        """The one NUMA node of all nodes that have one."""
        numbers = {numa_node(self.host, node) for node in nodes} - {None}
        return numbers.pop() if len(numbers) == 1 else None

    def ids(self, group: Group, device: Device) -> Sequence[str]:
        """The tokens of the bundle."""
        return tokens(device.key, group.options.count)

    def probe(self, device: Device) -> Iterable[Signal]:
        """Signals unless all its members are there and the same. They are about the bundle: its nodes may be in others."""
        hardware = f"{device.unit}/{device.key}"
        for node, number in zip(device.nodes, numbers(device.attributes), strict=True):
            if signal := node_signal(self.host, hardware, node.path.text, number):
                yield signal
        for mount in device.mounts:
            try:
                links_to_file(self.host, mount.path)
            except NoNodeError as error:
                yield Signal(hardware, "mount-missing", Verdict.NOW, error.sentence)

    # --- what is listened to ---

    def watches(self, known: Known) -> Watches:
        """All uevents, and the directories of all paths."""
        listed = (unit.removeprefix(self.prefix) for unit in known if unit.startswith(self.prefix))
        return Watches(frozenset({ANY_SUBSYSTEM}), frozenset(self._wanted.directories(listed)))

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """The groups with a path there, or a link that leads there; `change` events are passed over."""
        below: Iterable[str] = ()
        if isinstance(hint, PathChange):
            path = hint.path.text
            if self._wanted.leads_through(path):
                return ALL
            below = self._wanted.below.get(path, ())
        elif not isinstance(hint, Uevent) or hint.node is None or hint.action == "change":
            return ()
        else:
            path = hint.node.text
        return (
            *self._wanted.takers(path),
            *(unit for literal in below for unit in self._wanted.literals[literal]),
            *(unit for unit in known.minding(f"path:{path}") if unit in self._groups),
        )


def _attributes(members: Sequence[_Member]) -> Mapping[str, tuple[str, ...]]:
    more = {
        "mount": tuple(member.path.text for member in members if member.node is None),
        "alias": tuple(alias for member in members for alias in member.aliases),
    }
    return {
        **node_attributes([(member.path, member.node) for member in members if member.node]),
        **{name: values for name, values in more.items() if values},
    }


def _first(problems: Iterable[_T]) -> list[_T]:
    return list(islice(problems, _TOLD))


def _preference(options: Sequence[PathOption]) -> list[int]:
    """The paths in the order in which bundles are named after them: first a required glob of nodes.

    Shared nodes come late: other groups of the resource may have a bundle with the same node.
    """
    return sorted(
        range(len(options)),
        key=lambda k: (
            options[k].optional,
            options[k].type == "mount",
            options[k].shared,
            not is_glob(options[k].path),
            k,
        ),
    )


def _once(members: Iterable[_Member]) -> Iterator[_Member]:
    """Yield each node once: under its own name if that matches, else under the first. Mounts stay as they are."""
    names: dict[str, list[_Member]] = {}
    for member in members:
        names.setdefault(member.node.number if member.node else member.path.text, []).append(member)
    for same in names.values():
        best = next((member for member in same if member.node and member.path == member.node.path), same[0])
        aliases = tuple(member.path.text for member in same if member is not best)
        yield replace(best, aliases=aliases) if aliases else best


def _shortage(
    options: Sequence[PathOption], paths: Sequence[Matches[_Member]], bundles: Sequence[_Bundle]
) -> Iterator[str]:
    """Why some of what was found is in no bundle."""
    if not any(path.found for path in paths):
        return
    present = [(o, p) for o, p in zip(options, paths, strict=True) if p.found or not p.optional]
    scarce, least = min(present, key=lambda one: len(one[1].found) * one[1].limit)
    if not bundles:
        what = "nothing" if scarce.type == "mount" else "no device node"
        yield f"there is no bundle, because {scarce.path} matches {what}"
        return
    for option, path in present:
        if path.limit == 1 and len(path.found) > len(bundles):
            yield (
                f"of {option.path} there are {len(path.found)}, of {scarce.path} enough for "
                f"{len(least.found) * least.limit}: the others are in no bundle"
            )


def _collision(device: Device) -> str | None:
    """Which two members would have the same path in the container, as a sentence."""
    members: tuple[Node | Mount, ...] = (*device.nodes, *device.mounts)
    paths: dict[str, HostPath] = {}
    for one in members:
        if (other := paths.setdefault(one.container_path, one.path)) is not one.path:
            return f"{other} and {one.path} would both be {one.container_path} in the container"
    return None
