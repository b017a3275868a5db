"""Errors that are sentences for a person, and the exit codes they end in."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable
from typing import ClassVar


class ExitCode(enum.IntEnum):
    """What the program's exit says to whoever started it."""

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


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that does not exist, with the one that was probably meant."""
    choices = sorted(known)
    if near := difflib.get_close_matches(name, choices, n=1):
        return f"there is no {what} {name!r}; did you mean {near[0]!r}?"
    return f"there is no {what} {name!r}; there are {', '.join(map(repr, choices)) or 'none at all'}"
