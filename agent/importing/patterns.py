"""Turns regular expressions over the names in /dev into names or globs, where these mean the same.

Only what people write in smarter-device-manager's configuration is understood: characters, classes, `.`, quantifiers
and anchors. A regular expression and a glob differ more than it seems: `[0-9]*` is any number of digits to the one,
and a digit followed by anything to the other; `.` takes a `/`, and `?` does not.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MOST_NAMES: Final = 16
"""A pattern that means no more names than this is written out."""

_ATOM: Final = re.compile(
    r"(?P<any>\.)|(?P<escaped>\\[^A-Za-z0-9])|\\(?P<digit>d)|(?P<literal>[^\\.\[\](){}*+?|^$])"
    r"|\[(?P<negated>\^)?(?P<members>(?:[^\[\]\\^])+)\]"
)
_TIMES: Final = re.compile(r"(?P<sign>[*+?])|\{(?P<low>\d{1,3})(?P<more>,(?P<high>\d{1,3})?)?\}|")
_SIGNS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_WILD_START: Final = re.compile(r"[*?]|\[(?![*?\[]\])")
_IN_CLASS: Final = frozenset("]-!^\\[/")  # a glob's class writes them in another way, or not at all


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some characters, so many times."""

    members: frozenset[str]
    negated: bool
    low: int
    high: int | None
    """None is any number."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression that was understood."""

    pieces: tuple[_Piece, ...]
    starts: bool
    """Is it held to the start of a name?"""
    ends: bool

    def names(self) -> tuple[str, ...] | None:
        """Every name it matches, if these are few."""
        if not (self.starts and self.ends) or any(piece.negated or piece.high is None for piece in self.pieces):
            return None
        choices = [_choices(piece) for piece in self.pieces]
        if any(choice is None for choice in choices):
            return None
        found = [choice for choice in choices if choice is not None]
        if math.prod(map(len, found)) > MOST_NAMES:
            return None
        return tuple("".join(name) for name in itertools.product(*found))

    def glob(self) -> tuple[str, bool]:
        """The nearest glob, and whether it means the same."""
        parts = [_glob(piece) for piece in self.pieces]
        text = "".join(("" if self.starts else "*", *(part for part, _ in parts), "" if self.ends else "*"))
        hidden = any(_WILD_START.match(part) for part in text.split("/"))  # `.name`, which no wildcard takes there
        exact = bool(text) and self.starts and self.ends and not hidden and all(same for _, same in parts)
        return re.sub(r"\*+", "*", text), exact


def parse(expression: str) -> Pattern | None:
    """The pattern, or None where it has more to it than is understood here."""
    at, end = int(expression.startswith("^")), len(expression)
    ends = expression.endswith("$") and not expression.endswith("\\$")
    pieces: list[_Piece] = []
    while at < end - ends:
        atom = _ATOM.match(expression, at, end - ends)
        if atom is None:
            return None
        times = _TIMES.match(expression, atom.end(), end - ends)
        assert times is not None
        piece = _piece(atom, times)
        if piece is None:
            return None
        pieces.append(piece)
        at = times.end()
    return Pattern(tuple(pieces), expression.startswith("^"), ends)


def _piece(atom: re.Match[str], times: re.Match[str]) -> _Piece | None:
    members, negated = _members(atom)
    if members is None:
        return None
    if times["sign"]:
        return _Piece(members, negated, *_SIGNS[times["sign"]])
    if times["low"] is None:
        return _Piece(members, negated, 1, 1)
    low = int(times["low"])
    high = low if times["more"] is None else None if times["high"] is None else int(times["high"])
    return None if high is not None and high < low else _Piece(members, negated, low, high)


def _members(atom: re.Match[str]) -> tuple[frozenset[str] | None, bool]:
    if atom["any"]:
        return frozenset("\n"), True
    if atom["digit"]:
        return frozenset("0123456789"), False
    if atom["members"]:
        return _class(atom["members"]), bool(atom["negated"])
    return frozenset((atom["escaped"] or atom["literal"])[-1]), False


def _class(text: str) -> frozenset[str] | None:
    """The characters of `a-z_`; None where a range is upside down."""
    found: set[str] = set()
    for part in re.finditer(r"(.)-(.)|.", text, re.DOTALL):
        first, last = part[1] or part[0], part[2] or part[0]
        if first > last or ord(last) - ord(first) > 0xFF:
            return None
        found |= {chr(code) for code in range(ord(first), ord(last) + 1)}
    return frozenset(found)


def _choices(piece: _Piece) -> list[str] | None:
    assert piece.high is not None
    if sum(len(piece.members) ** times for times in range(piece.low, piece.high + 1)) > MOST_NAMES:
        return None
    repeated = (itertools.product(sorted(piece.members), repeat=n) for n in range(piece.low, piece.high + 1))
    return ["".join(name) for names in repeated for name in names]


def _glob(piece: _Piece) -> tuple[str, bool]:
    one, same = _glob_of_one(piece)
    if piece.high == piece.low:
        return one * piece.low, same
    if piece.high is None and piece.negated and piece.members == {"/"}:
        return "?" * piece.low + "*", True
    return one * max(piece.low, 1) + "*" if one != "?" or piece.low else "*", False


def _glob_of_one(piece: _Piece) -> tuple[str, bool]:
    if piece.negated:
        if piece.members == {"/"}:
            return "?", True
        inner = piece.members - {"/", "\n"}
        if inner & _IN_CLASS or not inner:
            return "?", False
        return f"[!{_ranges(inner)}]", "/" in piece.members
    if len(piece.members) == 1:
        (character,) = piece.members
        return (f"[{character}]" if character in "*?[" else character), True
    if piece.members & _IN_CLASS:
        return "?", False
    return f"[{_ranges(piece.members)}]", True


def _ranges(members: frozenset[str]) -> str:
    return "".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else "".join(run) for run in _runs(sorted(members)))


def _runs(characters: list[str]) -> Iterator[list[str]]:
    for _, run in itertools.groupby(enumerate(characters), lambda pair: ord(pair[1]) - pair[0]):
        yield [character for _, character in run]
