"""Notices that this process is short of file descriptors or memory, so that no backend is blamed for it."""

from __future__ import annotations

import errno
import os
import resource
from typing import Final

_ENOUGH: Final = 1 << 20  # descriptors, where the hard limit is none
_SPARE: Final = 4  # descriptors that one look at a unit needs at the same time
_SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


class ShortageError(Exception):
    """What a look at hardware showed means nothing, for this process could not look; one sentence."""


def raise_limits() -> None:
    """Allow this process as many open files as it may have; systemd's and shells' default is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def shortage() -> str:
    """What this process is short of now, in a few words; empty if it is not."""
    spare: list[int] = []
    try:
        spare.extend(os.open("/", os.O_PATH | os.O_CLOEXEC) for _ in range(_SPARE))
    except OSError as error:
        if error.errno in _SHORT:
            return f"Fairlead itself is short of something: {os.strerror(error.errno)}"
    finally:
        for file in spare:
            os.close(file)
    return ""


def check() -> None:
    """Let nothing bad be believed that was seen while this process could not look.

    Raises:
        ShortageError: it could not.
    """
    if short := shortage():
        raise ShortageError(f"{short}; what was seen last is kept")
