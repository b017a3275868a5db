"""Writes a sketch down as TOML; what `fairlead run` would refuse is commented out and reported as lost."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from agent.config.problems import ConfigError, ConfigProblem, Problems
from agent.config.resources import read_resources
from agent.importing import toml
from agent.importing.model import Draft, Imported, Part, Remark, Sketch
from backends import registry

_PLACE: Final = re.compile(r"resource\[(?P<index>\d+)\]\.?(?P<item>\w+\[\d+\])?(?P<rest>.*)")

_DIRECTORIES: Final = frozenset(
    f"/dev/{name}"
    for name in (
        "block",
        "bus/usb",
        "char",
        "cpu",
        "disk",
        "dri",
        "infiniband",
        "input",
        "mapper",
        "net",
        "snd",
        "vfio",
    )
)
"""Directories of any udev node. As devices, a container runtime hands out every node below them."""


def write(sketch: Sketch) -> Imported:
    """The document and everything that is to be said."""
    parts = _checked([_without_directories(part) for part in sketch.parts])
    remarks = sorted((remark for part in parts for remark in part.remarks), key=_by_line)
    return Imported("\n".join(_lines(sketch, parts)) + "\n", tuple(remarks))


def _without_directories(part: Part) -> Part:
    draft = part.draft
    if draft is None or not part.offered:
        return part
    for index, path in enumerate(draft.items("paths")):
        if path.get("type") != "mount" and path["path"] in _DIRECTORIES:
            sentence = (
                f"{draft.name}: {path['path']} is a directory, and Fairlead hands out nodes, not all that is below "
                "a directory; name the nodes that are needed, the resource is left out"
            )
            return _refused(part, [Remark(draft.line_of(f"paths[{index}]"), sentence)])
    return part


def _by_line(remark: Remark) -> int:
    return remark.line


def _refused(part: Part, remarks: Sequence[Remark]) -> Part:
    return replace(part, remarks=(*part.remarks, *remarks), offered=False)


def _checked(parts: Sequence[Part]) -> list[Part]:
    """The parts, those commented out that our own configuration would refuse."""
    offered = [index for index, part in enumerate(parts) if part.draft is not None and part.offered]
    drafts = [draft for part in parts if (draft := part.draft) is not None and part.offered]
    refused: dict[int, list[Remark]] = defaultdict(list)
    for problem in _problems(drafts):
        place = _PLACE.fullmatch(problem.path)
        assert place is not None
        index = int(place["index"])
        what = f"{place['item'] or ''}{place['rest']}".rpartition(".")[2]
        sentence = f"{drafts[index].name}: {what + ': ' if what else ''}{problem.sentence}; the resource is left out"
        refused[offered[index]].append(Remark(drafts[index].line_of(place["item"]), sentence))
    return [_refused(part, refused[index]) if index in refused else part for index, part in enumerate(parts)]


def _problems(drafts: Sequence[Draft]) -> tuple[ConfigProblem, ...]:
    problems = Problems(Path(), "")
    read_resources([_plain(draft) for draft in drafts], registry, problems)
    try:
        problems.raise_any()
    except ConfigError as error:
        return error.problems
    return ()


def _plain(draft: Draft) -> dict[str, Any]:
    return {"name": draft.name, "backend": "chardev", **draft.options}


def _lines(sketch: Sketch, parts: Sequence[Part]) -> Iterator[str]:
    yield from toml.comment(f"{sketch.source} Made by fairlead import; the lines named here are that file's.")
    if sketch.agent:
        yield from ("", "[agent]")
        for key, value in sketch.agent.items():
            yield from toml.pair(key, value)
    for part in parts:
        if part.remarks or part.draft is not None:
            yield ""
        for remark in sorted(part.remarks, key=_by_line):
            yield from toml.comment(f"Line {remark.line}: {remark}.")
        if part.draft is not None:
            yield from (line if part.offered else f"#{line}" for line in _resource(part.draft))


def _resource(draft: Draft) -> Iterator[str]:
    yield "[[resource]]"
    for key, value in _plain(draft).items():
        yield from toml.pair(key, value)
