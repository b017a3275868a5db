"""Writes a sketch down as TOML; what `fairlead run` would refuse is commented out and reported as lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from agent.config import syntax
from agent.importing.model import Draft, Imported, Part, Sketch
from agent.importing.places import Places
from agent.importing.refusals import table, without_refused


def write(sketches: Sequence[Sketch], places: Places) -> Imported:
    """The document that all sketches make together, and everything that is to be said."""
    parts = without_refused([part for sketch in sketches for part in sketch.parts])
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
    keys = table(draft)
    groups = keys.pop("groups", ())
    yield "[[resource]]"
    for key, value in keys.items():
        yield from syntax.pair(key, value)
    for group in groups:
        yield "[[resource.groups]]"
        for key, value in group.items():
            yield from syntax.pair(key, value)
