"""The values of an import: resources, remarks about them, the lines of its files, and the error that ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field

from agent.config.syntax import Value as Value  # noqa: PLC0414  # what drafts are made of
from agent.runtime.errors import ExitCode, FairleadError


class ImportRefusedError(FairleadError):
    """The file as a whole cannot be imported."""

    exit_code = ExitCode.USAGE

    def __init__(self, sentence: str, line: int | None = None) -> None:
        super().__init__(sentence)
        self.line = line
        """From 1; None where it is about the file as a whole."""


class Remark(Struct, frozen=True):
    """What a person has to know about one line of the imported file."""

    line: int
    sentence: str
    lost: bool = True
    """Whether something is not as it was. Else it is only good to know."""

    def __str__(self) -> str:
        return self.sentence if self.lost else f"note: {self.sentence}"


class DraftGroup(Struct, frozen=True):
    """One group of a `chardev` resource as it will be written; of another backend's, the resource's own keys."""

    options: Mapping[str, Value]
    line: int
    """Where the imported file says it."""
    lines: Mapping[str, int] = field(default_factory=dict)
    """Where it says the items of `options`, as in "paths[1]"."""

    def items(self, key: str) -> Sequence[Mapping[str, Any]]:
        """The tables of a list in `options`, none where it is not there."""
        found: Any = self.options.get(key, ())
        return tuple(found)

    def line_of(self, item: str | None) -> int:
        """Where an item stands, or else the group."""
        return self.lines.get(item or "", self.line)


class Draft(Struct, frozen=True):
    """A resource as it will be written."""

    name: str
    groups: tuple[DraftGroup, ...]
    line: int
    """Where the imported file names it."""
    backend: str = "chardev"

    @classmethod
    def of(
        cls,
        name: str,
        options: Mapping[str, Value],
        line: int,
        backend: str = "chardev",
        lines: Mapping[str, int] = MappingProxyType({}),
    ) -> Draft:
        """A resource of one group, whose items stand in `lines`."""
        return cls(name, (DraftGroup(options, line, lines),), line, backend)


class Part(Struct, frozen=True):
    """One paragraph of the configuration: what is said, and the resource it is said about, if there is one."""

    remarks: tuple[Remark, ...] = ()
    draft: Draft | None = None
    offered: bool = True
    """Whether the resource is in force; otherwise it is commented out as a suggestion."""


class Sketch(Struct, frozen=True):
    """What a format's reader makes of a file."""

    source: str
    """Whose configuration it was, with how IDs and the like differ: whole sentences."""
    parts: tuple[Part, ...]
    agent: Mapping[str, str] = field(default_factory=dict)
    """Keys of `[agent]`."""


class Places(Struct, frozen=True):
    """The files, whose lines are numbered as if they were one; each with the number of its first line."""

    first: Mapping[str, int]

    @classmethod
    def of(cls, texts: Mapping[str, str]) -> Places:
        """Number the lines of texts by the names of their files."""
        first, line = {}, 1
        for name, text in texts.items():
            first[name] = line
            line += text.count("\n") + 1
        return cls(first)

    def place(self, line: int | None) -> tuple[str, int | None]:
        """The file, and the number that the line has there; None is about the first file as a whole."""
        if line is None:
            return next(iter(self.first)), None
        name, first = max(((name, first) for name, first in self.first.items() if first <= line), key=lambda it: it[1])
        return name, line - first + 1

    def heading(self, line: int) -> str:
        """What a comment about a line begins with: only of several files the file is named."""
        name, number = self.place(line)
        return f"Line {number}" if len(self.first) == 1 else f"{name}:{number}"


class Imported(Struct, frozen=True):
    """The result: a document that `agent.config.load` accepts, and everything that was said, by line."""

    toml: str
    remarks: tuple[Remark, ...]
    places: Places
    """In which file each line is."""
    peers: tuple[str, ...] = ()
    """What has to go before Fairlead comes: `daemonset NAME of namespace NAMESPACE`."""

    @property
    def lossless(self) -> bool:
        """Whether it means what the imported file meant."""
        return not any(remark.lost for remark in self.remarks)
