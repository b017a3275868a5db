"""Lists a directory, and compares two listings: for directories that inotify does not watch."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

Entries = Mapping[str, tuple[int, int]] | None
"""Name → inode and time of the last change in ns; None: there is no such directory."""


class Change(enum.Enum):
    """What happened to an entry, or to a watched directory itself."""

    CREATED = "created"  # it appeared under this name: made, or renamed to it (perhaps over another)
    REMOVED = "removed"  # nothing has this name any more, or had for a moment
    CHANGED = "changed"  # its owner, permissions or links changed, or a writer closed it


def entries_of(directory: Path) -> Entries:
    """The entries as they are now, links as themselves."""
    found = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                with suppress(OSError):  # it vanished in this moment
                    status = entry.stat(follow_symlinks=False)
                    found[entry.name] = status.st_ino, status.st_ctime_ns
    except OSError:
        return None
    return found


def differences(before: Entries, now: Entries) -> Iterator[tuple[str, Change]]:
    """Each name whose entry differs, and what happened to it; an empty name for the directory itself."""
    if now is None:
        if before is not None:
            yield "", Change.REMOVED
        return
    if before is None:
        yield "", Change.CREATED
        before = {}
    yield from ((name, Change.REMOVED) for name in sorted(before.keys() - now.keys()))
    for name, (inode, changed) in now.items():
        if name not in before or before[name][0] != inode:
            yield name, Change.CREATED
        elif before[name][1] != changed:
            yield name, Change.CHANGED
