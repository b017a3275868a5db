"""Collects the mistakes of a configuration, finds the line of each, and raises all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from agent.config.toml_lines import KeyPath, key_lines, line_of
from agent.runtime.errors import ExitCode, FairleadError


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
