"""What readers read: `Fields`, typed values of a table of the imported file, and `Settings`, what a plugin is told beside it.

`Fields` says what is wrong with a value, and what was not asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from msgspec import Struct, field

from agent.importing.model import Draft, Part, Remark, Value
from agent.importing.yaml_tree import Items, Scalar, Table, Tree, plain

_WHOLE: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_BOOLS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_Value = TypeVar("_Value")


class Fields:
    """One table of the imported file. What was not asked for by the end is reported as lost."""

    def __init__(self, table: Table, about: str, remarks: list[Remark] | None = None) -> None:
        self._table = table
        self.about = about
        """What remarks begin with."""
        self.remarks: list[Remark] = [] if remarks is None else remarks
        """What is said of the table; a list that is handed in has that of the table around it, too."""
        self._asked: set[str] = set()
        self.sound = True
        """Whether every value that was asked for could be read."""

    @classmethod
    def named(cls, table: Table, key: str, unnamed: str) -> Fields:
        """A table whose remarks begin with the text at `key`; with `unnamed` where there is none."""
        return cls(table, cls(table, "").text(key) or unnamed)

    def part(self, draft: Draft | None = None, *, offered: bool = True) -> Part:
        """What was said, with the resource that it is said about."""
        return Part(tuple(self.remarks), draft, offered)

    def line(self, key: str) -> int:
        """Where a key stands, or else the table."""
        return self._table.lines.get(key, self._table.line)

    def lost(self, key: str, sentence: str) -> None:
        """What the key says is not carried over."""
        self.remarks.append(Remark(self.line(key), f"{self.about}: {sentence}"))

    def note(self, key: str, sentence: str) -> None:
        """What the key says is carried over, but there is something to know."""
        self.remarks.append(Remark(self.line(key), f"{self.about}: {sentence}", lost=False))

    def text(self, key: str) -> str | None:
        """A text, in quotes or not; None where it is missing, empty or none."""
        found = self._take(key, "a text", lambda tree: tree.text if isinstance(tree, Scalar) else None)
        return found or None

    def whole(self, key: str) -> int | None:
        """A whole number in decimal digits."""
        return self._take(key, "a whole number", _whole)

    def flag(self, key: str) -> bool:
        """True or false; false where it is missing."""
        return self._take(key, "true or false", _flag) or False

    def scalar(self, key: str) -> Scalar | None:
        """A text with what YAML takes it for."""
        return self._take(key, "a text", lambda tree: tree if isinstance(tree, Scalar) else None)

    def tables(self, key: str) -> Iterator[Table]:
        """The tables of a list."""
        found = self._take(key, "a list", lambda tree: tree if isinstance(tree, Items) else None)
        for item in found.items if found else ():
            if isinstance(item, Table):
                yield item
            else:
                self.sound = False
                sentence = f"{self.about}: {_shown(item)} in {key!r} should be a table; this is left out"
                self.remarks.append(Remark(item.line, sentence))

    def table(self, key: str) -> Mapping[str, Tree]:
        """What stands in a table; nothing where it is missing."""
        found = self._take(key, "a table", lambda tree: tree if isinstance(tree, Table) else None)
        return found.values if found else {}

    def tree(self, key: str) -> Tree | None:
        """The value as it stands in the file."""
        self._asked.add(key)
        return self._table.values.get(key)

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        found = self._take(key, "a list of texts", _texts)
        return found or []

    def end(self) -> None:
        """Report the keys that were not asked for."""
        for key in self._table.values:
            if key not in self._asked:
                self.lost(key, f"Fairlead has nothing for the key {key!r}")

    def _take(self, key: str, wanted: str, read: Callable[[Tree], _Value | None]) -> _Value | None:
        self._asked.add(key)
        tree = self._table.values.get(key)
        if tree is None or (isinstance(tree, Scalar) and tree.kind == "null"):
            return None
        value = read(tree)
        if value is None:
            self.sound = False
            self.lost(key, f"{key!r} is {_shown(tree)} and should be {wanted}; this is left out")
        return value


def _shown(tree: Tree) -> str:
    match tree:
        case Scalar(text=text):
            return repr(text)
        case Items():
            return "a list"
        case Table():
            return "a table"


def _texts(tree: Tree) -> list[str] | None:
    if not isinstance(tree, Items):
        return None
    texts = [item.text for item in tree.items if isinstance(item, Scalar)]
    return texts if len(texts) == len(tree.items) else None


def _whole(tree: Tree) -> int | None:
    return int(tree.text) if isinstance(tree, Scalar) and _WHOLE.fullmatch(tree.text) else None


def _flag(tree: Tree) -> bool | None:
    return _BOOLS.get(tree.text.lower()) if isinstance(tree, Scalar) and tree.kind == "bool" else None


def spelled(table: Table, keys: Sequence[str]) -> Table:
    """The table with its keys as they are documented: Go takes them in upper case and lower."""
    known = {key.lower(): key for key in keys}
    spelled = {key: known.get(key.lower(), key) for key in table.values}
    lines = {spelled[key]: line for key, line in table.lines.items()}
    return Table(table.line, {spelled[key]: tree for key, tree in table.values.items()}, lines)


class Settings(Struct):
    """What a plugin is told beside its configuration; each value knows its line."""

    arguments: dict[str, Scalar] = field(default_factory=dict)
    """Without their dashes; the last of several."""
    repeated: list[tuple[str, Scalar]] = field(default_factory=list)
    """All of them, in their order."""
    environment: dict[str, Scalar] = field(default_factory=dict)
    values: dict[str, Tree] = field(default_factory=dict)
    """Keys of its Helm chart's values, or of its operator's resource."""
    image: str = ""
    domain: str | None = None
    """As the command's own --domain says."""

    def table(self, names: Mapping[str, tuple[str, str]]) -> Table:
        """What is said of each key, whose argument and variable are named: arguments win, then the environment, then values."""
        found: dict[str, Tree] = {key: self.values[key] for key in names if key in self.values}
        for key, (argument, variable) in names.items():
            if (said := self.arguments.get(argument) or self.environment.get(variable)) is not None:
                found[key] = said
        return Table.of(1, found)

    def plain(self) -> object:
        """All of it without lines."""
        flags = [(name, value.text) for name, value in self.repeated]
        variables = {name: value.text for name, value in self.environment.items()}
        return flags, variables, {name: plain(value) for name, value in self.values.items()}


def together(one: Settings, other: Settings) -> Settings:
    """What both say; where they differ, what the second does."""
    return Settings(
        {**one.arguments, **other.arguments},
        [*one.repeated, *other.repeated],
        {**one.environment, **other.environment},
        {**one.values, **other.values},
        other.image or one.image,
    )


def as_argument(text: str, line: int, *, block: bool = False) -> Scalar:
    """A value from a command line or an environment, where everything is a text, as YAML would read it."""
    kind = "bool" if text.lower() in ("true", "false") else "str"
    return Scalar(line, text.lower() if kind == "bool" else text, kind, block)


USB_IDS: Final = ("vendor", "product")
_PLAIN: Final = re.compile(r"0|[1-9][0-9]*")
_XID: Final = re.compile(r"[1-9][0-9]{0,4}")


def usb_ids(fields: Fields) -> dict[str, Value]:
    """The digits of vendor and product, in quotes or not, as they are written; without what is missing."""
    found: dict[str, Value] = {}
    for key in USB_IDS:
        written = fields.scalar(key)
        if written is None or not written.text:
            continue
        if written.kind != "str" and not _PLAIN.fullmatch(written.text):
            fields.note(key, f"{written.text} without quotes is no text to YAML; it is taken for the digits of an ID")
        found[key] = written.text
    return found


def is_xid(text: str) -> bool:
    """Whether this is the number of an error of NVIDIA's driver."""
    return _XID.fullmatch(text) is not None
