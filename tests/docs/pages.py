"""The documentation's pages, and the blocks of commands, configurations and manifests that are printed on them.

A block's first line may have a mark after its language, which no renderer shows: ```` ```sh cluster ````. It says what the
commands need that a test has not. Blocks without a mark are run, one command a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
PAGES: Final = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for path in (
        *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(REPOSITORY / "docs").rglob("*.md"),
    )
)
LANGUAGES: Final = {"", "console", "json", "python", "sh", "text", "toml", "yaml"}
MARKS: Final = {
    "",
    "cluster",  # kubectl, and a cluster behind it
    "node",  # changes the machine it is typed on, as root: packages, units, drivers
    "sources",  # make in a checkout: the gate runs these targets, or what they run
}
_FENCE: Final = re.compile(r"^(?P<indent> *)```(?P<language>\w*) ?(?P<mark>.*)$")
_NAMED: Final = re.compile(r"`([\w./-]+)`:$")


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: str
    line: int
    language: str
    mark: str
    text: str
    file: str = ""
    """Its name, where the line before says what file it is: "`config.toml`:"."""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> tuple[Command, ...]:
        """What a reader types: each line of `sh`, and what follows `$ ` in `console`."""
        if self.language == "sh":
            lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
            return tuple(Command(line, None) for line in lines if line and not line.startswith("#"))
        if self.language != "console":
            return ()
        first, *rest = re.split(r"^\$ ", self.text, flags=re.MULTILINE)
        parts = [part.splitlines() for part in rest]
        found = [Command(lines[0], tuple(lines[1:])) for lines in parts]
        return tuple([Command("", tuple(first.splitlines())), *found] if first else found)


@dataclass(frozen=True)
class Command:
    """A command and what it prints; without a text, what a server that was started before prints then."""

    text: str
    printed: tuple[str, ...] | None
    """None where the page does not show it, as in `sh`."""


def text(page: str) -> str:
    return (REPOSITORY / page).read_text()


def blocks(page: str) -> Iterator[Block]:
    """Every fenced block of a page, in order."""
    inside: tuple[re.Match[str], int, str] | None = None
    lines: list[str] = []
    named = ""
    for number, line in enumerate(text(page).splitlines(), 1):
        fence = _FENCE.match(line)
        if inside is None and fence is not None:
            inside, lines = (fence, number, named), []
        elif inside is not None and fence is not None and not fence["language"]:
            opened, at, file = inside
            content = "".join(f"{it[len(opened['indent']) :]}\n" for it in lines)
            yield Block(page, at, opened["language"], opened["mark"], content, file)
            inside, named = None, ""
        elif inside is not None:
            lines.append(line)
        elif line:
            before = _NAMED.search(line)
            named = before[1] if before else ""


def every(*languages: str) -> Iterator[Block]:
    """The blocks of all pages in these languages."""
    return (block for page in PAGES for block in blocks(page) if block.language in languages)


def as_printed(line: str, printed: str) -> bool:
    """Whether a line is what the page shows. `…` stands for what differs each time."""
    return re.fullmatch(".*".join(map(re.escape, printed.split("…"))), line) is not None
