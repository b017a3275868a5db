"""Watches one file by inotify, whatever symbolic links lead to it: it comes, goes, is written or is replaced.

A ConfigMap's file is a link through a link `..data`, which a kubelet swaps; an editor writes another file and renames it
over the old one, or writes into it: all of that is an entry of some directory on the way which changes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR

from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from agent.discovery.sources.paths import Change, DirectoryWatch, trail
from agent.runtime.supervision.problems import Problems


class FileWatch:
    """Calls `on_change` whenever the file may have changed; it need not exist."""

    def __init__(self, file: Path, on_change: Callable[[], None], problems: Problems | None = None) -> None:
        """Prepare; the path is absolute."""
        self._file = file
        self._on_change = on_change
        self._entries: frozenset[Path] = frozenset()
        self._following = False
        self._directories = DirectoryWatch(self._changed, on_change, problems=problems)

    def follow(self) -> None:
        """Watch what the path leads to now. Call it after each change, before reading the file."""
        steps = trail(self._file).steps
        entries = [Path(place, name) for place, name in steps]
        links = [entry for entry in entries if entry.is_symlink()]
        self._entries = frozenset((self._file, self._file.parent, *entries))
        self._following = True
        self._directories.watch(frozenset((self._file.parent, *(entry.parent for entry in (*links, *entries[-1:])))))
        self._following = False

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """As `DirectoryWatch.run`."""
        self.follow()
        await self._directories.run(task_status=task_status)

    def _changed(self, path: Path, _change: Change) -> None:
        if path in self._entries and not self._following:
            self._on_change()

    def identity(self) -> tuple[tuple[str, int, int], ...]:
        """A value that differs whenever the file, or a link to it, was replaced or written."""
        found = []
        for place, name in trail(self._file).steps:
            with suppress(OSError):
                status = Path(place, name).lstat()
                if not S_ISDIR(status.st_mode):
                    found.append((f"{place}/{name}", status.st_ino, status.st_ctime_ns))
        return tuple(found)

    def changed_since(self, time: float) -> bool:
        """Was the file, or a link to it, replaced or written after this time, in seconds since 1970?"""
        for place, name in trail(self._file).steps:
            try:
                found = Path(place, name).lstat()
            except OSError:
                continue
            if found.st_ctime > time and not S_ISDIR(found.st_mode):
                return True
        return False
