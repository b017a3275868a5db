r"""Finds regular expressions of the configuration in names that hardware brings, without backtracking.

`re` tries one way through an expression after the other: for `(a+)+$` there are 2^40 ways through a name of 40 letters,
and a stick with such a name would stop the event loop. This follows all ways at once (Thompson, "Regular Expression
Search Algorithm", 1968), so that a name costs at most its length times the steps of the expression. `re` still reads each
single character, class and anchor, in which there is nothing to try twice.
"""

from __future__ import annotations

import functools
import re
import warnings
from typing import Final, TypeAlias

from msgspec import Struct

MOST_STEPS: Final = 320
"""Of an expression, each `{n}` written out: as many as a resource's name of 63 attributes takes. The longest name of a file,
255 characters, takes up to 30 ms with so many, and 25 us with those that people write."""

_LEAF: Final = re.compile(
    r"\[\^?\]?(?:\\.|[^\]\\])*\]"
    r"|\\(?:x..|u.{4}|U.{8}|N\{[^}]*\}|0[0-7]{0,2}|[0-3][0-7]{2}|[^0-9xuUN])"
    r"|[^\\\[()|]",
    re.DOTALL,
)
"""What matches one character or a place, as `re` would read it."""
_TIMES: Final = re.compile(r"(?:(?P<sign>[*+?])|\{(?=[\d,])(?P<low>\d*)(?P<more>,(?P<high>\d*))?\})(?P<mode>[?+]?)")
_SIGNS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_GROUP: Final = re.compile(r"\((?:\?(?::|P<\w+>)|(?!\?))")
_IGNORE_CASE: Final = "(?i)"


class PatternError(ValueError):
    """It is no regular expression, or one that only backtracking could find; the sentence says which and why."""


class _Sequence(Struct, frozen=True):
    parts: tuple[_Tree, ...]


class _Choice(Struct, frozen=True):
    ways: tuple[_Tree, ...]


class _Repeated(Struct, frozen=True):
    part: _Tree
    low: int
    high: int | None
    """None is any number."""


_Tree: TypeAlias = "re.Pattern[str] | _Sequence | _Choice | _Repeated"


class Pattern:
    """A regular expression of Python's that has neither back-references nor looks around, nor any flag but `(?i)`.

    Raises:
        PatternError: it is another one.
    """

    __slots__ = ("_start", "_steps")

    def __init__(self, text: str) -> None:
        try:
            re.compile(text)
            tree = _Reader(text).tree
        except (re.error, OverflowError, RecursionError) as error:
            raise PatternError(f"{text!r} is no regular expression: {error}") from None
        self._steps: list[tuple[re.Pattern[str] | None, tuple[int, ...]]] = [(None, ())]
        """What must match, and where that leads; the first is the end, and one without a matcher only leads on."""
        self._start = self._add(tree, 0, text)

    def is_in(self, name: str) -> bool:
        """Whether it finds something in the name, as `re.search` would."""
        now: set[int] = set()
        for at in range(len(name) + 1):
            waiting, passed, following = [*now, self._start], set[int](), set[int]()
            while waiting:
                if (step := waiting.pop()) in passed:
                    continue
                if not step:
                    return True
                passed.add(step)
                matcher, then = self._steps[step]
                if matcher is None:
                    waiting += then
                elif (found := matcher.match(name, at)) is not None:
                    (following.update if found.end() > at else waiting.extend)(then)
            now = following
        return False

    def _add(self, tree: _Tree, then: int, text: str) -> int:
        """Add the steps of a tree that lead to step `then`; returns the first of them."""
        if isinstance(tree, re.Pattern):
            return self._step(tree, (then,), text)
        if isinstance(tree, _Sequence):
            for part in reversed(tree.parts):
                then = self._add(part, then, text)
            return then
        if isinstance(tree, _Choice):
            return self._step(None, tuple(self._add(way, then, text) for way in tree.ways), text)
        if tree.high is None:
            again = self._step(None, (then,), text)
            self._steps[again] = None, (self._add(tree.part, again, text), then)
            start = again
        else:
            start = then
            for _ in range(tree.high - tree.low):
                start = self._step(None, (self._add(tree.part, start, text), then), text)
        for _ in range(tree.low):
            before, start = start, self._add(tree.part, start, text)
            if start == before:  # of nothing, so often
                break
        return start

    def _step(self, matcher: re.Pattern[str] | None, then: tuple[int, ...], text: str) -> int:
        if len(self._steps) > MOST_STEPS:
            raise PatternError(
                f"{text!r} comes to more than {MOST_STEPS} steps with each repetition written out; write '*' or '+' for {{}}"
            )
        self._steps.append((matcher, then))
        return len(self._steps) - 1


class _Reader:
    """Reads an expression that `re` has found well written."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._flags = re.IGNORECASE if text.startswith(_IGNORE_CASE) else re.NOFLAG
        self._at = len(_IGNORE_CASE) if self._flags else 0
        self.tree = self._choice()

    def _choice(self) -> _Tree:
        ways = [self._sequence()]
        while self._text.startswith("|", self._at):
            self._at += 1
            ways.append(self._sequence())
        return _Choice(tuple(ways)) if len(ways) > 1 else ways[0]

    def _sequence(self) -> _Tree:
        parts: list[_Tree] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._part()
            if times := _TIMES.match(self._text, self._at):
                part = _Repeated(part, *self._times(times))
            parts.append(part)
        return _Sequence(tuple(parts))

    def _part(self) -> _Tree:
        if group := _GROUP.match(self._text, self._at):
            self._at = group.end()
            tree = self._choice()
            self._at += 1  # the parenthesis
            return tree
        if leaf := _LEAF.match(self._text, self._at):
            self._at = leaf.end()
            return re.compile(leaf[0], self._flags)
        raise self._refusal(self._at)

    def _times(self, times: re.Match[str]) -> tuple[int, int | None]:
        if times["mode"] == "+":
            raise self._refusal(times.start())
        self._at = times.end()
        if times["sign"]:
            return _SIGNS[times["sign"]]
        low = int(times["low"] or 0)
        return low, low if times["more"] is None else int(times["high"]) if times["high"] else None

    def _refusal(self, at: int) -> PatternError:
        return PatternError(
            f"{self._text!r} has {self._text[at : at + 4]!r}, which is not read here: back-references, looking ahead or "
            "behind, possessive and conditional parts, comments, and flags but for '(?i)' at the start; write it without"
        )


@functools.lru_cache(256)
def pattern(text: str) -> Pattern:
    """A pattern, made once.

    Raises:
        PatternError: as `Pattern`.
    """
    return Pattern(text)


def complaint(text: str) -> str | None:
    """Why this cannot be a pattern, one sentence; None if it can."""
    try:
        with warnings.catch_warnings(action="error"):
            Pattern(text)
    except (PatternError, FutureWarning) as error:
        return str(error) if isinstance(error, PatternError) else f"{text!r} is no regular expression: {error}"
    return None
