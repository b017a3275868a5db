"""Writes a sketch down as TOML; what `fairlead run` would refuse is commented out and reported as lost."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from agent.config import syntax
from agent.config.problems import ConfigError, ConfigProblem, Problems
from agent.config.resources import read_resources
from agent.importing.model import Draft, DraftGroup, Imported, Part, Places, Remark, Sketch
from backends import registry


def write(sketches: Sequence[Sketch], places: Places) -> Imported:
    """The document that all sketches make together, and everything that is to be said."""
    parts = _without_refused([part for sketch in sketches for part in sketch.parts])
    remarks = sorted((remark for part in parts for remark in part.remarks), key=attrgetter("line"))
    return Imported("\n".join(_lines(sketches, parts, places)) + "\n", tuple(remarks), places)


def _lines(sketches: Sequence[Sketch], parts: Sequence[Part], places: Places) -> Iterator[str]:
    *above, last = (sketch.source for sketch in sketches)
    for source in above:
        yield from syntax.comment(source)
    whose = "that file's" if len(places.first) == 1 else "those files'"
    yield from syntax.comment(f"{last} Made by fairlead import; the lines named here are {whose}.")
    if agent := {key: value for sketch in sketches for key, value in sketch.agent.items()}:
        yield from ("", "[agent]")
        for key, value in agent.items():
            yield from syntax.pair(key, value)
    for part in parts:
        if part.remarks or part.draft is not None:
            yield ""
        for remark in sorted(part.remarks, key=attrgetter("line")):
            yield from syntax.comment(f"{places.heading(remark.line)}: {remark}.")
        if part.draft is not None:
            yield from (line if part.offered else f"#{line}" for line in _resource(part.draft))


def _resource(draft: Draft) -> Iterator[str]:
    keys = _table(draft)
    groups = keys.pop("groups", ())
    yield "[[resource]]"
    for key, value in keys.items():
        yield from syntax.pair(key, value)
    for group in groups:
        yield "[[resource.groups]]"
        for key, value in group.items():
            yield from syntax.pair(key, value)


# --- what is refused ---

_PLACE: Final = re.compile(
    r"resource\[(?P<index>\d+)\]\.?(groups\[(?P<group>\d+)\])?\.?(?P<item>\w+\[\d+\])?(?P<rest>.*)"
)

_UDEV: Final = ("block", "bus/usb", "char", "cpu", "disk", "dri", "infiniband", "input", "mapper", "net", "snd", "vfio")
_DIRECTORIES: Final = frozenset(f"/dev/{name}" for name in _UDEV)
"""Directories of any udev node. As devices, a container runtime hands out every node below them."""

_Refusals = Mapping[int, Sequence[Remark]]
"""Group → why it cannot be offered."""


def _table(draft: Draft) -> dict[str, Any]:
    """The resource as its TOML will say it; one group has its keys in the resource itself."""
    head = {"name": draft.name, "backend": draft.backend}
    if len(draft.groups) == 1:
        return {**head, **draft.groups[0].options}
    return {**head, "groups": [dict(group.options) for group in draft.groups]}


def _without_refused(parts: Sequence[Part]) -> list[Part]:
    """The parts; the groups that would be refused are parts of their own, commented out."""
    parts = [new for part in parts for new in _without(part, _directories(part))]
    while refusals := _refusals(parts):  # groups are compared once each is right by itself
        parts = [new for index, part in enumerate(parts) for new in _without(part, refusals.get(index, {}))]
    return list(parts)


def _without(part: Part, refusals: _Refusals) -> Iterator[Part]:
    if part.draft is None or not refusals:
        yield part
        return
    kept = tuple(group for index, group in enumerate(part.draft.groups) if index not in refusals)
    if not kept:
        every = [remark for remarks in refusals.values() for remark in remarks]
        yield replace(part, remarks=(*part.remarks, *dict.fromkeys(every)), offered=False)
        return
    yield replace(part, draft=replace(part.draft, groups=kept))
    for index, remarks in sorted(refusals.items()):
        group = part.draft.groups[index]
        yield Part(tuple(remarks), Draft(part.draft.name, (group,), group.line), offered=False)


def _directories(part: Part) -> _Refusals:
    if part.draft is None or not part.offered:
        return {}
    found = ((index, _directory(part.draft, group)) for index, group in enumerate(part.draft.groups))
    return {index: (remark,) for index, remark in found if remark}


def _directory(draft: Draft, group: DraftGroup) -> Remark | None:
    paths = group.items("paths")
    for index, path in enumerate(paths):
        if len(paths) > 1 and path.get("type") != "mount" and path["path"] in _DIRECTORIES:
            sentence = (
                f"{draft.name}: {path['path']} is a directory, which Fairlead hands out alone, not beside other paths; "
                f"name the nodes that are needed, {'the resource' if len(draft.groups) == 1 else 'the group'} is left out"
            )
            return Remark(group.line_of(f"paths[{index}]"), sentence)
    return None


def _refusals(parts: Sequence[Part]) -> Mapping[int, _Refusals]:
    """Part → what our own configuration has against its groups."""
    offered = [(index, part.draft) for index, part in enumerate(parts) if part.draft is not None and part.offered]
    refusals: dict[int, dict[int, list[Remark]]] = defaultdict(lambda: defaultdict(list))
    for problem in _problems([draft for _, draft in offered]):
        place = _PLACE.fullmatch(problem.path)
        assert place is not None
        index, draft = offered[int(place["index"])]
        for group, remark in _refused(draft, place, problem):
            refusals[index][group].append(remark)
    return refusals


def _refused(draft: Draft, place: re.Match[str], problem: ConfigProblem) -> Iterator[tuple[int, Remark]]:
    """The groups that a problem is about, all of them if it is the resource's, and what is said."""
    what = f"{place['item'] or ''}{place['rest']}".rpartition(".")[2]
    subject = f"{what}: " if what else "a group " if place["group"] else ""
    sentence = f"{draft.name}: {subject}{problem.sentence}; "
    if len(draft.groups) == 1:
        yield 0, Remark(draft.groups[0].line_of(place["item"]), f"{sentence}the resource is left out")
    elif place["group"] is not None:
        index = int(place["group"])
        yield index, Remark(draft.groups[index].line_of(place["item"]), f"{sentence}the group is left out")
    else:
        remark = Remark(draft.line, f"{sentence}the resource is left out")
        yield from ((index, remark) for index in range(len(draft.groups)))


def _problems(drafts: Sequence[Draft]) -> tuple[ConfigProblem, ...]:
    problems = Problems(Path(), "")
    read_resources([_table(draft) for draft in drafts], registry, problems)
    try:
        problems.raise_any()
    except ConfigError as error:
        return error.problems
    return ()
