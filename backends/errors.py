"""Says what an error of the system means: its reason in words, and whether the hardware or this process is at fault."""

from __future__ import annotations

import errno
from typing import Final

_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ShortageError(Exception):
    """This process could not look at the hardware, so that what it saw means nothing; one sentence.

    It is no OSError, since many places take an OSError for a missing file.
    """


def reason_of(error: OSError) -> str:
    """The reason without number and file, in lower case: `permission denied`."""
    return (error.strerror or str(error)).lower()


def is_short(error: BaseException | None) -> bool:
    """Is this process, or the system, out of file descriptors or memory?"""
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
