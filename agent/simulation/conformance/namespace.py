"""Runs a command in a mount namespace where one directory is seen in another's place: `namespace.py PLACE DIRECTORY COMMAND...`.

A program by itself, which imports nothing of ours: it becomes the command, and the command's start is measured.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLONE_NEWNS = 0x20000  # linux/sched.h
_MS_BIND = 0x1000  # linux/mount.h
_MS_REC_PRIVATE = 0x4000 | 1 << 18  # linux/mount.h: MS_REC, MS_PRIVATE


def enter(place: str, directory: str) -> None:
    """Have this process, and what it becomes, see the directory at that place.

    Raises:
        OSError: that may not be done here.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int, what: str) -> None:
        if result != 0:
            raise OSError(number := ctypes.get_errno(), os.strerror(number), what)

    check(libc.unshare(_CLONE_NEWNS), "a mount namespace of its own")
    check(libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC_PRIVATE), None), "/")
    check(libc.mount(os.fsencode(directory), os.fsencode(place), None, ctypes.c_ulong(_MS_BIND), None), place)


if __name__ == "__main__":
    try:
        enter(*sys.argv[1:3])
        os.execvp(sys.argv[3], sys.argv[3:])  # noqa: S606  # the plugin's own command line, without a shell
    except OSError as error:
        sys.exit(f"{error.filename or sys.argv[3]}: {error.strerror}")
