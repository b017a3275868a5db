"""Collects the mistakes of a configuration, finds the line of each, and raises all of them at once.

`tomllib` tells lines of syntax errors only. The scanner here trusts that it has accepted the document, so it looks only for what
separates keys and values, and is a tenth of a parser.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from agent.runtime.errors import ExitCode, FairleadError

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top: `("resource", 0, "paths", 1, "permissions")`."""

_BLANK: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY: Final = re.compile(r'[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|\'[^\']*\'')
_SPACE: Final = re.compile(r"[ \t]*")
# The longer quotes first. A text in triple quotes may end with two more quotes of its own.
_SCALAR: Final = re.compile(
    r'"""(?:\\.|[^\\])*?""""{0,2}'
    r"|'''.*?''''{0,2}"
    r'|"(?:\\.|[^"\\])*"'
    r"|'[^']*'"
    r"|[^,\]}#\n]+",
    re.DOTALL,
)


class ConfigProblem(Struct, frozen=True):
    """One mistake in a configuration file."""

    file: Path
    line: int | None
    """From 1; None where it is about the file as a whole."""
    path: str
    """The key, as in `resource[0].paths[1].permissions`; empty where it is about the file as a whole."""
    sentence: str

    def __str__(self) -> str:
        place = str(self.file) if self.line is None else f"{self.file}:{self.line}"
        return ": ".join(part for part in (place, self.path, self.sentence) if part)


class ConfigError(FairleadError):
    """The configuration cannot be used; every reason is in `problems`, in the file's order."""

    exit_code = ExitCode.USAGE

    def __init__(self, problems: tuple[ConfigProblem, ...]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class Problems:
    """Collects what is wrong with one document."""

    def __init__(self, file: Path, document: str) -> None:
        self._file = file
        self._document = document
        self._found: list[tuple[KeyPath, str]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, path: KeyPath, sentence: str) -> None:
        """Note what is wrong with the value at this path."""
        self._found.append((path, sentence))

    def place(self, path: KeyPath) -> str:
        """Where something is written, for a sentence about something else."""
        line = line_of(self.lines(), path)
        return written(path) if line is None else f"{written(path)} (line {line})"

    def lines(self) -> Mapping[KeyPath, int]:
        """The lines of the document's keys; looked for only when something is wrong."""
        return key_lines(self._document)

    def raise_any(self) -> None:
        """Raise if anything was found.

        Raises:
            ConfigError: with all of it, in the order of the lines.
        """
        if not self._found:
            return
        lines = self.lines()
        problems = [
            ConfigProblem(self._file, line_of(lines, path), written(path), sentence) for path, sentence in self._found
        ]
        raise ConfigError(tuple(sorted(problems, key=lambda problem: problem.line or 0)))


def written(path: KeyPath) -> str:
    """A path as a person writes it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


# --- where a key stands ---


def key_lines(document: str) -> Mapping[KeyPath, int]:
    """The line, from 1, of every key, table and list item in a valid document."""
    scanner = _Scanner(document.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


def line_of(lines: Mapping[KeyPath, int], path: KeyPath) -> int | None:
    """The line of a path, or of the nearest thing around it that is written down."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path)


class _Scanner:
    """Walks one document from top to bottom."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._counted = (0, 1)  # a position and its line: counting goes on from there
        self._list_sizes: dict[KeyPath, int] = {}
        self.lines: dict[KeyPath, int] = {}

    def document(self) -> None:
        table: KeyPath = ()
        while self._skip(_BLANK) < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)

    def _skip(self, pattern: re.Pattern[str]) -> int:
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return self._at

    def _line(self) -> int:
        position, line = self._counted
        line += self._text.count("\n", position, self._at)
        self._counted = (self._at, line)
        return line

    def _header(self) -> KeyPath:
        line = self._line()
        is_list = self._text.startswith("[[", self._at)
        self._at += 2 if is_list else 1
        keys = self._keys()
        self._at += 2 if is_list else 1
        table = self._outer(keys, line)
        if is_list:
            self.lines.setdefault(table, line)
            size = self._list_sizes[table] = self._list_sizes.get(table, 0) + 1
            table = (*table, size - 1)
        self.lines[table] = line  # its own header says more than an earlier one of a table in it
        return table

    def _outer(self, keys: list[str], line: int) -> KeyPath:
        """A header's keys as a path: below an array of tables they mean its last one."""
        path: KeyPath = ()
        for key in keys[:-1]:
            path = (*path, key)
            self.lines.setdefault(path, line)
            if path in self._list_sizes:
                path = (*path, self._list_sizes[path] - 1)
        return (*path, keys[-1])

    def _keys(self) -> list[str]:
        """A key, which may be dotted, up to what follows it."""
        found = []
        while True:
            start = self._skip(_SPACE)
            found.append(_plain(self._text[start : self._skip(_KEY)]))
            self._skip(_SPACE)
            if not self._text.startswith(".", self._at):
                return found
            self._at += 1

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        for key in self._keys():
            table = (*table, key)
            self.lines.setdefault(table, line)
        self._at += 1  # the "="
        self._skip(_SPACE)
        self._value(table)

    def _value(self, path: KeyPath) -> None:
        opening = self._text[self._at]
        if opening == "[":
            self._list(path)
        elif opening == "{":
            self._inline_table(path)
        else:
            self._skip(_SCALAR)

    def _list(self, path: KeyPath) -> None:
        self._at += 1
        index = 0
        while not self._closes("]"):
            item = (*path, index)
            self.lines[item] = self._line()
            self._value(item)
            index += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._at += 1
        while not self._closes("}"):
            self._pair(path)

    def _closes(self, bracket: str) -> bool:
        """Step over a comma and what is blank; returns whether that is the end, and no further item follows."""
        if self._text[self._skip(_BLANK)] == ",":
            self._at += 1
            self._skip(_BLANK)
        if self._text[self._at] != bracket:
            return False
        self._at += 1
        return True


def _plain(key: str) -> str:
    if key[0] == '"':
        return next(iter(tomllib.loads(f"{key} = 0")))
    return key.strip("'")
