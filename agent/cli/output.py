"""What the commands print: plain off a terminal, coloured on one unless NO_COLOR is set, readable at 80 columns."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click
import msgspec

from agent.runtime.errors import some
from backends.errors import printable

_COLORS: Final = {"Healthy": "green", "Degraded": "yellow", "Unhealthy": "red", "Drained": "cyan"}
_MOST_COLUMNS: Final = 120  # longer lines are hard to read
_USUAL_COLUMNS: Final = 80
_OURS: Final = re.compile(r"(\x1b\[(?:0|1|2|31|32|33|36)m|\n)")
_BLANKS: Final = re.compile(r"\s*\n\s*")
_WORD: Final = re.compile(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+\s*|.""")
"""Of a shell's command, with the blanks behind it."""
_COLOR: Final = re.compile(r"\x1b\[[0-9]*m")
NAMED: Final = 8
"""Names in one sentence."""


def echo(text: str = "") -> None:
    """Print lines; click takes the colours out where there is no terminal. Only colours of ours reach one."""
    click.echo(_shown(text), color=False if os.environ.get("NO_COLOR") else None)


def note(text: str) -> None:
    """Print a note on stderr."""
    click.echo(_shown("\n".join(_lines(text))), err=True)


def _shown(text: str) -> str:
    """The text without what a terminal would obey, but for our colours and line breaks."""
    parts = _OURS.split(text)
    return "".join(part if n % 2 else printable(part) for n, part in enumerate(parts))


def echo_json(document: Any) -> None:
    """Print one JSON document on one line; what a terminal would obey is escaped there too."""
    text = msgspec.json.encode(document).decode()
    click.echo(text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text))


def is_terminal() -> bool:
    """Whether output goes to a terminal. Elsewhere no line is folded: a program that searches it needs whole lines."""
    return sys.stdout.isatty()


def columns() -> int:
    """How wide lines may be; off a terminal, how wide a drawing is."""
    if not is_terminal():
        return _USUAL_COLUMNS
    return min(shutil.get_terminal_size((_USUAL_COLUMNS, 24)).columns, _MOST_COLUMNS)


def state(name: str, text: str | None = None) -> str:
    """A state's name, or a text about it, in its colour."""
    return click.style(text or name, fg=_COLORS.get(name))


def dim(text: str) -> str:
    """What is beside the matter."""
    return click.style(text, dim=True)


def clipped(line: str, columns: int) -> str:
    """A line as far as a screen is wide; its colours take no room."""
    out, room = "", columns
    for n, part in enumerate(_OURS.split(line)):
        shown = part if n % 2 else part[:room]
        room -= 0 if n % 2 else len(shown)
        out += shown
    return out


def draw(text: str) -> None:
    """Write to a terminal's screen at once, with what moves its cursor."""
    shown = _COLOR.sub("", text) if os.environ.get("NO_COLOR") else text
    click.echo(shown, nl=False, color=True)
    sys.stdout.flush()


def bold(text: str) -> str:
    """A heading."""
    return click.style(text, bold=True)


def wrapped(text: str, indent: int, hanging: int | None = None) -> str:
    """A sentence on as many lines as it takes; the first is indented, the others hang below it. Off a terminal, on one."""
    below = " " * (indent if hanging is None else hanging)
    return "\n".join(_lines(text, " " * indent, below))


def with_ids(name: str, ids: Sequence[str]) -> str:
    """A device as a person calls it, with its IDs; empty where it has none."""
    listed = some(ids, NAMED)
    return f"{name} ({listed})" if name and listed and tuple(ids) != (name,) else listed


def advised(parts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """What a reason asks for, below its device, each part with its label."""
    for label, text in parts:
        line = f"{label:<5} {text}"
        yield _command(f"    {line}", 10) if label == "run" else wrapped(line, 4, 10)


def _command(line: str, hanging: int) -> str:
    """A command that is copied: where it has no room, on lines that a shell takes for one."""
    if not is_terminal():
        return line
    folded = line[:hanging]
    room = columns() - hanging - len(" \\")
    for word in _WORD.findall(line[hanging:]):
        if room < len(word.rstrip()) and not folded.endswith(" " * hanging):
            folded = f"{folded.rstrip()} \\\n{' ' * hanging}"
            room = columns() - hanging - len(" \\")
        folded += word
        room -= len(word)
    return folded


def _lines(text: str, first: str = "", below: str = "") -> list[str]:
    """A path is not broken, however long: who reads it copies it."""
    if not is_terminal():
        return [first + _BLANKS.sub(" ", text)]
    return textwrap.wrap(
        text, columns(), initial_indent=first, subsequent_indent=below, break_on_hyphens=False, break_long_words=False
    )


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 1,
    cut: Mapping[int, tuple[str, int]] | None = None,
) -> Iterator[str]:
    """Lines with aligned columns: the first `left` of them to the left, the rest, which are numbers, to the right.

    Where a terminal is too narrow for that, the columns that `cut` names are cut, on that side and not below that width; else a long first cell
    stands on a line of its own above its row.
    """
    every = [headings, *rows]
    widths = [max(len(click.unstyle(row[n])) for row in every) for n in range(len(headings))]
    room = columns() - sum(width + 2 for width in widths[1:])
    if cut and widths[0] > room:
        kept = _narrowed(widths, cut, widths[0] - room)
        every = [[_cut(cell, kept[n], cut[n][0]) if n in cut else cell for n, cell in enumerate(row)] for row in every]
        widths = kept
    elif widths[0] > room and is_terminal():
        widths[0] = max((len(row[0]) for row in every if len(row[0]) <= room), default=len(headings[0]))
    for number, (first, *others) in enumerate(every):
        if len(first) > widths[0]:
            yield first
            first = ""  # it has been said
        cells = [_padded(cell, widths[n], to_the_left=n < left) for n, cell in enumerate((first, *others))]
        line = "  ".join(cells).rstrip()
        yield bold(line) if number == 0 else line


def _narrowed(widths: Sequence[int], cut: Mapping[int, tuple[str, int]], excess: int) -> list[int]:
    """The widths without what is too much, taken from the widest that may be cut."""
    kept = list(widths)
    for _ in range(excess):
        if not (may := [n for n, (_, least) in cut.items() if kept[n] > least]):
            break
        kept[max(may, key=kept.__getitem__)] -= 1
    return kept


def _cut(cell: str, width: int, side: str) -> str:
    if len(cell) <= width:
        return cell
    return f"{cell[: width - 1]}…" if side == "right" else f"…{cell[len(cell) - width + 1 :]}"


def _padded(cell: str, width: int, *, to_the_left: bool) -> str:
    room = " " * (width - len(click.unstyle(cell)))
    return cell + room if to_the_left else room + cell


def moment(seconds: float) -> str:
    """A time since 1970 in UTC, as the log, the page and every sentence of the daemon have it; the time alone if it was today."""
    when = datetime.fromtimestamp(seconds, UTC)
    is_today = is_terminal() and when.date() == datetime.now(UTC).date()
    return when.strftime("%H:%M:%S UTC" if is_today else "%Y-%m-%d %H:%M:%S UTC")


def since(seconds: float, *, is_brief: bool) -> str:
    """The same as one word; in brief without seconds and offset, or without the time of day."""
    when = datetime.fromtimestamp(seconds, UTC)
    if not is_brief:
        return when.strftime("%Y-%m-%dT%H:%M:%SZ")
    return when.strftime("%H:%M" if when.date() == datetime.now(UTC).date() else "%m-%d")


def ago(seconds: float) -> str:
    """How long something has lasted, in its largest unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def now() -> float:
    """Seconds since 1970."""
    return time.time()
