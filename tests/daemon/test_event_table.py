"""docs/events.md is what the sources say: every event with its level and fields, and every field with one meaning."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

REPOSITORY: Final = Path(__file__).parents[2]
_LOGGERS: Final = ("log", "_log")
_LEVELS: Final = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}
_NO_FIELDS: Final = ("exc_info",)
_ROW: Final = re.compile(r"\| `(?P<name>[a-z-]+)` \| (?P<level>[a-z, ]+) \|(?P<fields>[^|]*)\| (?P<meaning>.+) \|")
_FIELD: Final = re.compile(r"\| `(?P<name>[a-z_]+)` \| (?P<meaning>.+) \|")


class Event(NamedTuple):
    levels: frozenset[str]
    fields: frozenset[str]


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Each call that logs, with its method: `log.info(…)`, or both of `(log.info if well else log.warning)(…)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for func in (node.func.body, node.func.orelse) if isinstance(node.func, ast.IfExp) else (node.func,):
                if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id in _LOGGERS:
                    yield node, func.attr


def _names(node: ast.expr) -> tuple[str, ...]:
    """The event's name, or both of `a if x else b`."""
    if isinstance(node, ast.IfExp):
        return *_names(node.body), *_names(node.orelse)
    assert isinstance(node, ast.Constant), f"an event's name is written out where it is logged: {ast.unparse(node)}"
    return (str(node.value),)


def _troubles(tree: ast.Module) -> Iterator[tuple[str, str, frozenset[str]]]:
    """The events that `Problems.trouble` is given, with their levels and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "trouble":
            words = {word.arg: word.value for word in node.keywords if word.arg}
            level = ast.literal_eval(words.pop("level")) if "level" in words else "warning"
            fields = frozenset(words) - {"fades"}
            yield _names(node.args[2])[0], level, fields | {"reason"}
            if len(node.args) > 3:
                yield _names(node.args[3])[0], "info", fields - {"then"}


@cache
def said() -> dict[str, Event]:
    """Every event of the sources, over all the places that log it."""
    levels, fields = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for package in ("agent", "backends"):
        for file in (REPOSITORY / package).rglob("*.py"):
            tree = ast.parse(file.read_text())
            for name, level, with_fields in _troubles(tree):
                levels[name].add(level)
                fields[name] |= with_fields
            for call, method in _calls(tree):
                for name in _names(call.args[0]):
                    levels[name].add(_LEVELS[method])
                    fields[name] |= {word.arg for word in call.keywords if word.arg} - {*_NO_FIELDS}
    return {name: Event(frozenset(levels[name]), frozenset(fields[name])) for name in levels}


def _section(title: str) -> str:
    return (REPOSITORY / "docs/events.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def documented() -> dict[str, Event]:
    rows = [_ROW.fullmatch(line) for line in _section("Events").splitlines() if line.startswith("| `")]
    return {
        row["name"]: Event(frozenset(row["level"].split(", ")), frozenset(re.findall("`([a-z_]+)`", row["fields"])))
        for row in rows
        if row is not None
    }


def explained() -> dict[str, str]:
    rows = [_FIELD.fullmatch(line) for line in _section("Fields").splitlines()]
    return {row["name"]: row["meaning"] for row in rows if row is not None}


def test_every_event_is_in_the_table_with_its_level_and_fields() -> None:
    assert documented() == said()


def test_every_row_of_the_table_can_be_read() -> None:
    rows = [line for line in _section("Events").splitlines() if line.startswith("| `")]
    assert len(rows) == len(documented())
    assert [row.split("`")[1] for row in rows] == sorted(documented()), "in the order of the alphabet"


def test_every_field_has_one_meaning_and_is_used() -> None:
    used = frozenset[str]().union(*(event.fields for event in said().values()))
    assert explained().keys() == used
