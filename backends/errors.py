"""Says what an error of the system means: its reason in words, and whether it tells of the hardware or of ourselves."""

from __future__ import annotations

import errno
from typing import Final

_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ShortageError(Exception):
    """What a look at hardware showed means nothing, for this process could not look; one sentence.

    It is no OSError: what cannot be read is taken for missing in many places, and this must not be.
    """


def reason_of(error: OSError) -> str:
    """Its reason without number and file, in lower case: `permission denied`."""
    return (error.strerror or str(error)).lower()


def is_short(error: BaseException | None) -> bool:
    """Is this process, or the system, out of what an open file or a connection takes?"""
    return isinstance(error, OSError) and error.errno in _SHORT


def not_short(error: OSError) -> OSError:
    """The error, if it says something of the file; to be called where a failed read is taken for an answer.

    Raises:
        ShortageError: it says that this process could not look.
    """
    if error.errno in _SHORT:
        raise ShortageError(
            f"Fairlead itself is short of something: {error.strerror}; what was seen last is kept"
        ) from error
    return error
