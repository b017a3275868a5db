"""Reads YAML as texts, lists and tables that know their lines; no object is ever made of what a file says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import yaml
from msgspec import Struct

from agent.importing.model import ImportRefusedError

MOST_BYTES: Final = 256 * 1024
"""No node's configuration is a tenth of this; PyYAML takes about 5 µs for a byte."""

_MOST_NODES: Final = 100_000  # aliases let a small file mean a large one
_DEEPEST: Final = 100
_CORE: Final = "tag:yaml.org,2002:"
_SCALARS: Final = {f"{_CORE}{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp")}


class Scalar(Struct, frozen=True):
    """A text as it is written."""

    line: int
    text: str
    kind: str
    """What YAML takes it for: "str", "int", "float", "bool", "null" or "timestamp"."""


class Items(Struct, frozen=True):
    """A list."""

    line: int
    items: tuple[Tree, ...]


class Table(Struct, frozen=True):
    """A mapping with texts for keys."""

    line: int
    values: Mapping[str, Tree]
    lines: Mapping[str, int]
    """Where each key stands."""

    @classmethod
    def of(cls, line: int, values: Mapping[str, Tree]) -> Table:
        """A table of values from several places, each with its own line."""
        return cls(line, values, {key: tree.line for key, tree in values.items()})


Tree = Scalar | Items | Table


def below(tree: Tree | None, *keys: str) -> Tree | None:
    """What stands under these keys, each in the table of the one before it; None where one is missing."""
    for key in keys:
        tree = tree.values.get(key) if isinstance(tree, Table) else None
    return tree


def text_at(tree: Tree | None, *keys: str) -> str | None:
    """The text that stands under these keys, as it is written; None where there is none."""
    found = below(tree, *keys)
    return found.text if isinstance(found, Scalar) else None


def read_yaml(text: str, first: int = 1) -> list[Tree]:
    """The documents of a YAML stream, whose first line has this number.

    Raises:
        ImportRefusedError: it is no YAML, or more of it than any device plugin needs.
    """
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON may be indented so, and YAML not
    try:
        return [_Copy(first).tree(node, 0) for node in yaml.compose_all(text, yaml.SafeLoader)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = error.problem or error.context or "it cannot be read"
        raise ImportRefusedError(f"this is no YAML: {what}", mark.line + first if mark else None) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + first
        raise ImportRefusedError("this is no YAML: it has a character that YAML does not allow", line) from error
    except RecursionError as error:
        raise ImportRefusedError("the file has lists or tables that are nested too deeply") from error


class _Copy:
    """Copies one document out of PyYAML's nodes, within limits."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._room = _MOST_NODES

    def tree(self, node: yaml.Node, depth: int) -> Tree:
        line = node.start_mark.line + self._first
        self._room -= 1
        if self._room < 0 or depth > _DEEPEST:
            raise ImportRefusedError("the file's aliases make it too large; write out what they stand for", line)
        match node:
            case yaml.MappingNode(tag=tag) if tag == f"{_CORE}map":
                return self._table(node, line, depth)
            case yaml.SequenceNode(tag=tag) if tag == f"{_CORE}seq":
                return Items(line, tuple(self.tree(item, depth + 1) for item in node.value))
            case yaml.ScalarNode(tag=tag) if tag in _SCALARS:
                return Scalar(line, _sound(node.value, line), tag.removeprefix(_CORE))
        tag = node.tag.replace(_CORE, "!!")
        raise ImportRefusedError(f"the tag {tag!r} is not read; write plain texts, lists and tables", line)

    def _table(self, node: yaml.MappingNode, line: int, depth: int) -> Table:
        values: dict[str, Tree] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            at = key.start_mark.line + self._first
            if not isinstance(key, yaml.ScalarNode):
                raise ImportRefusedError("a key is a list or a table; only texts can be keys", at)
            if key.tag == f"{_CORE}merge":
                raise ImportRefusedError("the merge key '<<' is not read; write out what it brings in", at)
            name = _sound(key.value, at)
            if name in values:
                raise ImportRefusedError(f"the key {name!r} stands there twice", at)
            lines[name] = at
            values[name] = self.tree(value, depth + 1)
        return Table(line, values, lines)


def _sound(text: str, line: int) -> str:
    """A text whose escapes, which may be JSON's pairs of surrogates, make whole characters."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ImportRefusedError("a text has half of a surrogate pair, which is no character", line) from error
