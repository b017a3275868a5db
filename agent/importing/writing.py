"""Writes a sketch down as TOML; what `fairlead run` would refuse is commented out and reported as lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agent.importing import toml
from agent.importing.model import Draft, Imported, Part, Remark, Sketch
from agent.importing.refusals import table, without_refused


def write(sketch: Sketch) -> Imported:
    """The document and everything that is to be said."""
    parts = without_refused(sketch.parts)
    remarks = sorted((remark for part in parts for remark in part.remarks), key=_by_line)
    return Imported("\n".join(_lines(sketch, parts)) + "\n", tuple(remarks))


def _by_line(remark: Remark) -> int:
    return remark.line


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
    keys = table(draft)
    groups = keys.pop("groups", ())
    yield "[[resource]]"
    for key, value in keys.items():
        yield from toml.pair(key, value)
    for group in groups:
        yield "[[resource.groups]]"
        for key, value in group.items():
            yield from toml.pair(key, value)
