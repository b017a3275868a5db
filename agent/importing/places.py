"""Numbers the lines of several files as if they were one, and says in which file a line is."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct


class Places(Struct, frozen=True):
    """The files, each with the number of its first line."""

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
