"""Errors that are sentences for a person, and the exit codes they end in."""

from __future__ import annotations

import difflib
import enum
import heapq
import os
import string
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import ClassVar, Final

_LISTED: Final = 20  # names in one sentence; a node may have thousands
_COMPARED: Final = 400  # names that one is compared with
_SOME: Final = 4  # names in one phrase of a sentence
_LONGEST: Final = 400  # characters of a name in a sentence: a resource's has 316 at most, a device's hardly ever 100


class ExitCode(enum.IntEnum):
    """What the program's exit says to what started it."""

    OK = 0
    """It did what it was asked."""
    TROUBLE = 1
    """The node, the kubelet or the system did not let it."""
    USAGE = 2
    """The command line or the configuration is wrong; trying again changes nothing."""


class FairleadError(Exception):
    """Something a person has to know or do, said in a sentence; it is shown without a traceback."""

    exit_code: ClassVar[ExitCode] = ExitCode.TROUBLE

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


def unknown(
    what: str, name: str, known: Iterable[str], others: Iterable[str] = (), elsewhere: str = "", most: int = _LISTED
) -> str:
    """The sentence for a name that does not exist, with the one that was probably meant.

    Where none is near, those that are known are listed, `most` of them, without the `others` that are known too; of more
    than a few it says where they are listed, if that is known. Of names that differ only in a number at their end
    none is more likely than the others: which numbers there are is said. Of thousands of names,
    those are near that begin alike: comparing it with all of them takes half a second.
    """
    known, others = set(known), tuple(others)
    name = brief(name)  # comparing a megabyte with every name takes minutes
    if numbers := _numbers(name, chain(known, others)):
        return f"there is no {what} {name!r}; there {numbers}"
    if near := difflib.get_close_matches(name, [*_around(name, known), *_around(name, others)], n=1):
        return f"there is no {what} {name!r}; did you mean {near[0]!r}?"
    if elsewhere and len(known) > _SOME:
        return f"there is no {what} {name!r}; {elsewhere}"
    shown = ", ".join(map(repr, sorted(known)[:most])) or "none at all"
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return f"there is no {what} {name!r}; there are {shown}{more}"


def candidates(name: str, names: Collection[str]) -> set[str]:
    """Those of the names that `unknown` could mention: a caller with 50,000 narrows them down some at a time."""
    name = brief(name)
    stem = name.rstrip(string.digits)
    return {*_around(name, names), *(it for it in names if stem not in ("", name) and it.startswith(stem))}


def _numbers(name: str, known: Iterable[str]) -> str:
    """Which numbers there are of the names that are this one but for its number; empty if there are none."""
    stem = name.rstrip(string.digits)
    if not stem or stem == name:
        return ""
    ends = [it[len(stem) :] for it in known if it.startswith(stem)]
    of = sorted({int(end) for end in ends if end.isascii() and end.isdigit() and (end == "0" or end[0] != "0")})
    if not of:
        return ""
    if len(of) == 1:
        return f"is {stem}{of[0]}"
    if of[-1] - of[0] == len(of) - 1:
        return f"are {stem}{of[0]} to {stem}{of[-1]}"
    return f"are {some([f'{stem}{it}' for it in of], _LISTED)}"


def _around(name: str, known: Collection[str]) -> Iterable[str]:
    """The names around the place where `name` would stand, in their order; all, where they are few.

    Sorting 30,000 takes 20 ms, in which the event loop does nothing else.
    """
    if len(known) <= _COMPARED:
        return sorted(known)
    before = heapq.nlargest(_COMPARED // 2, (it for it in known if it <= name))
    return [*reversed(before), *heapq.nsmallest(_COMPARED // 2, (it for it in known if it > name))]


def brief(text: str, most: int = _LONGEST) -> str:
    """The text, cut to `most` characters: others wrote it, and it may have a megabyte."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def brief_list(texts: Sequence[str]) -> list[str]:
    """The first of them, each brief, and how many more there are."""
    more = [f"and {len(texts) - _LISTED} more"] if len(texts) > _LISTED else []
    return [*map(brief, texts[:_LISTED]), *more]


def some(names: Sequence[str], most: int = _SOME) -> str:
    """The first of them in one phrase, and how many more there are; empty if there are none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def words(error: BaseException) -> str:
    """The text of an error; without the number, where it is the system's; its `repr`, where it has no text."""
    if isinstance(error, OSError) and error.strerror:
        about = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
        return f"{error.strerror}{about}"
    try:
        return str(error) or repr(error)
    except Exception:  # noqa: BLE001  # a backend's error may raise when it is shown
        return f"{type(error).__name__}, which cannot be shown"


def shown(error: BaseException) -> str:
    """An error with its type, as `repr` has it; also one that cannot be shown."""
    try:
        return repr(error)
    except Exception:  # noqa: BLE001  # as above
        return f"{type(error).__name__}, which cannot be shown"
