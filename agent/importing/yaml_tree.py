"""Reads YAML as texts, lists and tables that know their lines; no object is ever made of what a file says."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import yaml
from msgspec import Struct

from agent.importing.model import ImportRefusedError

MOST_BYTES: Final = 1024 * 1024
"""What kubectl prints of a namespace is smaller; PyYAML takes about 5 µs for a byte."""

_MOST_NODES: Final = 200_000  # aliases let a small file mean a large one
_DEEPEST: Final = 100
_CORE: Final = "tag:yaml.org,2002:"
_TEMPLATE: Final = re.compile(r"\{\{|\{%")
"""What no YAML has by itself, but the templates of Helm, Go and Jinja do."""

_SCALARS: Final = {f"{_CORE}{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp")}


class Scalar(Struct, frozen=True):
    """A text as it is written."""

    line: int
    text: str
    kind: str
    """What YAML takes it for: "str", "int", "float", "bool", "null" or "timestamp"."""
    block: bool = False
    """Whether its text stands line by line below `line`, as after `|`."""


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

    def only(self, keys: Collection[str]) -> Table:
        """The same with no other keys than these."""
        values = {key: tree for key, tree in self.values.items() if key in keys}
        return Table(self.line, values, {key: self.lines[key] for key in values})

    def without(self, keys: Collection[str]) -> Table:
        """The same without these keys."""
        return self.only(self.values.keys() - set(keys))


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


def items_at(tree: Tree | None, *keys: str) -> tuple[Tree, ...]:
    """The items of the list that stands under these keys; none where there is none."""
    found = below(tree, *keys)
    return found.items if isinstance(found, Items) else ()


def values_at(tree: Tree | None, *keys: str) -> Mapping[str, Tree]:
    """The values of the table that stands under these keys; none where there is none."""
    found = below(tree, *keys)
    return found.values if isinstance(found, Table) else {}


def scalars(tree: Tree | None) -> Iterator[Scalar]:
    """All texts below, in their order; no keys."""
    match tree:
        case Scalar():
            yield tree
        case Items(items=items):
            for item in items:
                yield from scalars(item)
        case Table(values=values):
            for value in values.values():
                yield from scalars(value)


def plain(tree: Tree) -> object:
    """The tree without its lines, to compare it with another."""
    match tree:
        case Items(items=items):
            return tuple(map(plain, items))
        case Table(values=values):
            return tuple(sorted((key, plain(value)) for key, value in values.items()))
    return tree.text


def merged(under: Table, over: Table) -> Table:
    """Both tables as one, as Helm merges values: tables key by key; of everything else the second's counts."""
    values: dict[str, Tree] = dict(under.values)
    for key, value in over.values.items():
        before = values.get(key)
        values[key] = merged(before, value) if isinstance(before, Table) and isinstance(value, Table) else value
    return Table(over.line, values, {**under.lines, **over.lines})


def embedded(text: Scalar) -> list[Tree]:
    """The documents that a text has, with their lines in the file around it.

    Raises:
        ImportRefusedError: as `read_yaml`.
    """
    return read_yaml(text.text, text.line + text.block, is_spread=text.block)


def read_yaml(text: str, first: int = 1, *, is_spread: bool = True) -> list[Tree]:
    """The documents of a YAML stream.

    Args:
        text: the stream.
        first: the number of its first line.
        is_spread: whether each of its lines is one of the file's; else all are `first`, as of a text in quotes.

    Raises:
        ImportRefusedError: it is no YAML, or more of it than any device plugin needs.
    """
    if text.lstrip().startswith("{"):
        text = text.replace("\t", " ")  # JSON may be indented so, and YAML not
    try:
        return _documents(text, first, is_spread)
    except ImportRefusedError as error:
        if found := _TEMPLATE.search(text):
            line = text.count("\n", 0, found.start()) * is_spread + first
            why = "this is a template and no YAML yet; import what it makes: `helm template`, `kustomize build` or `kubectl get -o yaml`"
            raise ImportRefusedError(why, line) from error
        raise


def _documents(text: str, first: int, is_spread: bool) -> list[Tree]:
    try:
        return [_Copy(first, is_spread).tree(node, 0) for node in yaml.compose_all(text, yaml.SafeLoader)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = error.problem or error.context or "it cannot be read"
        line = mark.line * is_spread + first if mark else None
        raise ImportRefusedError(f"this is no YAML: {what}", line) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) * is_spread + first
        raise ImportRefusedError("this is no YAML: it has a character that YAML does not allow", line) from error
    except RecursionError as error:
        raise ImportRefusedError("the file has lists or tables that are nested too deeply") from error


class _Copy:
    """Copies one document out of PyYAML's nodes, within limits."""

    def __init__(self, first: int, is_spread: bool) -> None:
        self._first = first
        self._is_spread = is_spread
        self._room = _MOST_NODES

    def _line(self, node: yaml.Node) -> int:
        return int(node.start_mark.line) * self._is_spread + self._first

    def tree(self, node: yaml.Node, depth: int) -> Tree:
        line = self._line(node)
        self._room -= 1
        if self._room < 0 or depth > _DEEPEST:
            raise ImportRefusedError("the file's aliases make it too large; write out what they stand for", line)
        match node:
            case yaml.MappingNode(tag=tag) if tag == f"{_CORE}map":
                return self._table(node, line, depth)
            case yaml.SequenceNode(tag=tag) if tag == f"{_CORE}seq":
                return Items(line, tuple(self.tree(item, depth + 1) for item in node.value))
            case yaml.ScalarNode(tag=tag) if tag in _SCALARS:
                is_block = self._is_spread and node.style in ("|", ">")
                return Scalar(line, _sound(node.value, line), tag.removeprefix(_CORE), is_block)
        tag = node.tag.replace(_CORE, "!!")
        raise ImportRefusedError(f"the tag {tag!r} is not read; write plain texts, lists and tables", line)

    def _table(self, node: yaml.MappingNode, line: int, depth: int) -> Table:
        table = Table(line, {}, {})
        values: dict[str, Tree] = {}
        lines: dict[str, int] = {}
        for key, value in node.value:
            at = self._line(key)
            if not isinstance(key, yaml.ScalarNode):
                raise ImportRefusedError("a key is a list or a table; only texts can be keys", at)
            if key.tag == f"{_CORE}merge":
                for brought in self._brought(value, at, depth):
                    table = Table(line, {**brought.values, **table.values}, {**brought.lines, **table.lines})
                continue
            name = _sound(key.value, at)
            if name in values:
                raise ImportRefusedError(f"the key {name!r} stands there twice", at)
            lines[name] = at
            values[name] = self.tree(value, depth + 1)
        return Table(line, {**table.values, **values}, {**table.lines, **lines})

    def _brought(self, node: yaml.Node, line: int, depth: int) -> list[Table]:
        """What the merge key `<<` brings in: a table, or several, of which the first has precedence."""
        tree = self.tree(node, depth + 1)
        tables = [it for it in (tree.items if isinstance(tree, Items) else (tree,)) if isinstance(it, Table)]
        if not tables:
            raise ImportRefusedError("the merge key '<<' brings in no table", line)
        return tables


def _sound(text: str, line: int) -> str:
    """A text whose escapes, which may be JSON's pairs of surrogates, make whole characters."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ImportRefusedError("a text has half of a surrogate pair, which is no character", line) from error
