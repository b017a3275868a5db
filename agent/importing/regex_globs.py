"""Turns regular expressions over the paths below /dev into names, or into globs that take all that they might.

Only what people write in smarter-device-manager's configuration is understood: characters, classes, `.`, quantifiers
and anchors. What is not understood is still carried over where a `pattern` of ours and Go read it alike.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Final

from msgspec import Struct

from backends.interface.patterns import complaint

MOST_NAMES: Final = 16
"""A pattern that means no more names than this is written out."""

DEEPEST: Final = 4
"""So far below /dev nodes are looked for: none that the kernel or udev makes is deeper than /dev/bus/usb/001/002."""

_ATOM: Final = re.compile(
    r"(?P<any>\.)|(?P<escaped>\\[^A-Za-z0-9])|\\(?P<digit>d)|(?P<literal>[^\\.\[\](){}*+?|^$])"
    r"|\[(?P<negated>\^)?(?P<members>(?:[^\[\]\\^])+)\]"
)
_TIMES: Final = re.compile(r"(?P<sign>[*+?])|\{(?P<low>\d{1,3})(?P<more>,(?P<high>\d{1,3})?)?\}|")
_SIGNS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_UNLIKE: Final = re.compile(r"\\[pPQECzZ0-9]|\[[^\]]*(\[|--|&&|~~|\|\|)|\(\?[^:]|[*+?}]\+")
"""What one of Go and Python does not have, or takes for something else."""


class _Piece(Struct, frozen=True):
    """Some characters, so many times."""

    members: frozenset[str]
    negated: bool
    low: int
    high: int | None
    """None is any number."""


def names(expression: str) -> tuple[str, ...] | None:
    """Every path below /dev that an expression finds, if these are few and nothing else is found."""
    pieces = _anchored(expression)
    choices = [_choices(piece) for piece in pieces or ()]
    known = [choice for choice in choices if choice is not None]
    if not pieces or len(known) < len(choices) or math.prod(map(len, known)) > MOST_NAMES:
        return None
    return tuple("".join(name) for name in itertools.product(*known))


def globs(expression: str) -> tuple[str, ...]:
    """Globs below /dev that together take all that an expression may find, down to `DEEPEST`."""
    pieces = _anchored(expression)
    prefix = "".join(itertools.chain.from_iterable(p.members for p in itertools.takewhile(_is_literal, pieces or ())))
    glob = re.sub(r"([*?\[])", r"[\1]", prefix) + "*"
    rest = (pieces or ())[len(prefix) :]
    if pieces is not None and not any(_may_take_slash(piece) for piece in rest if not _is_literal(piece)):
        return (glob + "/*" * sum("/" in piece.members and not piece.negated for piece in rest),)
    depth = glob.count("/") + 1
    return tuple(glob + "/*" * below for below in range(max(1, DEEPEST + 1 - depth)))


def is_understood(expression: str) -> bool:
    """Do Go and our own `pattern` read the expression alike?"""
    return _UNLIKE.search(expression) is None and complaint(expression) is None


def _anchored(expression: str) -> tuple[_Piece, ...] | None:
    """The pieces of an expression that is held to both ends of a path; None where it is not, or has more to it."""
    if not expression.startswith("^") or not expression.endswith("$") or expression.endswith("\\$"):
        return None
    pieces: list[_Piece] = []
    at, end = 1, len(expression) - 1
    while at < end:
        atom = _ATOM.match(expression, at, end)
        times = atom and _TIMES.match(expression, atom.end(), end)
        if not atom or not times or (piece := _piece(atom, times)) is None:
            return None
        pieces.append(piece)
        at = times.end()
    return tuple(pieces)


def _is_literal(piece: _Piece) -> bool:
    return not piece.negated and len(piece.members) == 1 and piece.low == piece.high == 1


def _may_take_slash(piece: _Piece) -> bool:
    return ("/" in piece.members) is not piece.negated


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
    """Every text that a piece takes, if these are few."""
    if piece.negated or piece.high is None:
        return None
    if sum(len(piece.members) ** times for times in range(piece.low, piece.high + 1)) > MOST_NAMES:
        return None
    repeated = (itertools.product(sorted(piece.members), repeat=n) for n in range(piece.low, piece.high + 1))
    return ["".join(name) for names in repeated for name in names]
