"""Says what an error means and whose fault it is, gathers the errors of several acts, and makes others' names safe to print."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ShortageError(Exception):
    """This process could not look at the hardware, so that what it saw means nothing; one sentence.

    It is no OSError, since many places take an OSError for a missing file.
    """


def reason_of(error: OSError) -> str:
    """The reason without number and file, in lower case: `permission denied`."""
    return (error.strerror or str(error)).lower()


def several(number: int, thing: str) -> str:
    """So many of a thing, in words: `1 port`, `2 ports`."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def is_short(error: BaseException | None) -> bool:
    """Whether this process, or the system, is out of file descriptors or memory."""
    return isinstance(error, OSError) and error.errno in _SHORT


def not_short(error: OSError) -> OSError:
    """The error itself. Call this wherever a failed read is taken for an answer.

    Raises:
        ShortageError: the error tells that this process could not look.
    """
    if error.errno in _SHORT:
        raise ShortageError(
            f"Fairlead itself is short of something: {error.strerror}; what was seen last is kept"
        ) from error
    return error


_Thing = TypeVar("_Thing")


def each(
    act: Callable[[_Thing], object],
    things: Iterable[_Thing],
    failing: type[Exception] | tuple[type[Exception], ...],
    failed: str,
) -> None:
    """Act on all of them, in their order.

    Raises:
        ExceptionGroup: `failed` in the way that is expected; anything else ends it at once.
    """
    failures: list[Exception] = []
    for thing in things:
        try:
            act(thing)
        except failing as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup(failed, failures)


def printable(text: str) -> str:
    """The text; what cannot be printed, or reverses a line, is escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """The same for a text that has lines."""
    return "\n".join(map(printable, text.split("\n")))
