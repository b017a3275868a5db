"""Watches directories, and files, by inotify: entries that come, go and change.

A directory is watched by its name: it may be missing, be replaced, or be reached through symbolic links. Every directory
on the way to it is watched too, so that a change of what the name leads to is seen. So is each directory that leads to a
watched file: a ConfigMap's file is a link through a link `..data`, which a kubelet swaps; an editor writes another file and
renames it over the old one, or writes into it. All of that is an entry which changes.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from stat import S_ISDIR
from typing import Final

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from msgspec import Struct, field

from agent.discovery.sources import Beat, Emit, Resync, read_in_turns, unwatched
from agent.runtime.problems import Problems, Troubles
from backends.base import Host, HostPath, PathChange

# --- inotify itself, and what stands in for it ---


ATTRIB: Final = 0x4  # linux/inotify.h
CLOSE_WRITE: Final = 0x8
MOVED_FROM: Final = 0x40
MOVED_TO: Final = 0x80
CREATE: Final = 0x100
DELETE: Final = 0x200
Q_OVERFLOW: Final = 0x4000
IGNORED: Final = 0x8000
ONLYDIR: Final = 0x0100_0000
MASK_ADD: Final = 0x2000_0000

_HEAD: Final = struct.Struct("iIII")  # struct inotify_event: wd, mask, cookie, len; the name follows
_READ_BYTES: Final = 16 << 10  # some 300 events between two turns of the event loop: 2 ms
_EVENT_BYTES: Final = _HEAD.size + 256  # of the one with the longest name, NAME_MAX

_C: Final = ctypes.CDLL(None, use_errno=True)


class Inotify:
    """One instance; its methods raise OSError as the system calls fail (inotify(7))."""

    def __init__(self) -> None:
        self._fd = _checked(_C.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def fileno(self) -> int:
        """Its descriptor, to read events from; it does not block."""
        return self._fd

    def close(self) -> None:
        """Watch nothing any more."""
        os.close(self._fd)

    def add_watch(self, path: str, mask: int) -> int:
        """Watch this; the watch's descriptor."""
        return _checked(_C.inotify_add_watch(self._fd, os.fsencode(path), mask))

    def rm_watch(self, wd: int) -> None:
        """Watch it no more."""
        _checked(_C.inotify_rm_watch(self._fd, wd))

    def read(self) -> tuple[list[tuple[int, int, str]], bool]:
        """Descriptor, mask and name of each event that waits, as many as fit in one read; and whether more may wait."""
        data, events, at = os.read(self._fd, _READ_BYTES), [], 0
        while at < len(data):
            wd, mask, _, size = _HEAD.unpack_from(data, at)
            at += _HEAD.size + size
            events.append((wd, mask, os.fsdecode(data[at - size : at].rstrip(b"\0"))))
        return events, len(data) > _READ_BYTES - _EVENT_BYTES


def _checked(result: int) -> int:
    if result == -1:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))
    return result


# --- where it does not watch ---

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


__all__ = ["POLL", "Change", "DirectoryWatch", "PathSource", "Trail", "trail"]


_APPEARED: Final = CREATE | MOVED_TO
_VANISHED: Final = DELETE | MOVED_FROM
_ON_THE_WAY: Final = _APPEARED | _VANISHED
_WANTED: Final = _ON_THE_WAY | ATTRIB | CLOSE_WRITE
_OPTIONS: Final = ONLYDIR | MASK_ADD  # one inode may be wanted and on the way: add, never replace
_EVERYTHING: Final = "/"  # stands for all directories where there is no inotify instance
POLL: Final = 5.0
"""Seconds between two looks at directories that inotify does not watch."""

_MAX_LINKS: Final = 40  # symbolic links in one path, as the kernel's MAXSYMLINKS


class Trail(Struct, frozen=True):
    """How a path is resolved now: every (directory, name) looked at, and the directory it leads to, if any."""

    steps: tuple[tuple[str, str], ...]
    end: str | None


def trail(path: Path) -> Trail:
    """Resolve a path step by step, as the kernel does."""
    here, steps, links = "/", [], 0
    ahead = list(reversed(path.parts[1:]))
    while ahead:
        name = ahead.pop()
        if name == "..":
            here = os.path.dirname(here)  # noqa: PTH120  # strings: `here` holds no link, and this runs often
            continue
        steps.append((here, name))
        there = os.path.join(here, name)  # noqa: PTH118
        try:
            mode = os.lstat(there).st_mode
            target = os.readlink(there) if stat.S_ISLNK(mode) else None  # noqa: PTH115
        except OSError:
            return Trail(tuple(steps), None)
        if target is not None and links < _MAX_LINKS:
            links += 1
            here = "/" if target.startswith("/") else here
            ahead.extend(part for part in reversed(target.split("/")) if part not in ("", "."))
        elif stat.S_ISDIR(mode):
            here = there
        else:
            return Trail(tuple(steps), None)
    return Trail(tuple(steps), here)


class _Watched(Struct, frozen=True):
    """What the watch descriptors stand for."""

    directories: Mapping[Path, int] = field(default_factory=dict)
    """Wanted directory → its descriptor."""
    aliases: Mapping[int, tuple[Path, ...]] = field(default_factory=dict)
    """Descriptor → the wanted directories it is; several where links or bind mounts lead to one."""
    on_the_way: Mapping[int, Mapping[str, frozenset[Path]]] = field(default_factory=dict)
    """Descriptor → the names in it that lead to wanted directories → which."""


class DirectoryWatch:
    """Reports every change in the wanted directories, and when one of them appears or vanishes.

    When a wanted directory vanishes, it is reported REMOVED itself, once for all that was in it. When it appears, it is
    reported CREATED, and then every entry that is already in it. One that exists when it is first wanted is reported
    CREATED itself, without its entries: list it then. Where inotify has no instances or watches left, the directories
    are listed every `POLL` seconds, and the same is reported.
    """

    def __init__(
        self,
        on_change: Callable[[Path, Change], None],
        on_overflow: Callable[[], None],
        beat: Beat = unwatched,
        problems: Problems | None = None,
    ) -> None:
        self._on_change = on_change
        self._beat = beat
        self._on_overflow = on_overflow
        self._wanted: frozenset[Path] = frozenset()
        self._inotify: Inotify | None = None
        self._watched = _Watched()
        self._vanished: set[Path] = set()
        told = problems or Problems()
        self._refused = Troubles(
            lambda it: told.trouble("inotify", f"{it} is not watched", "directory-unwatched", directory=it, then="")
        )
        self._unwatched: dict[Path, Entries] = {}

    def watch(self, directories: frozenset[Path]) -> None:
        """Watch these, all of them absolute, and no others; they need not exist."""
        fresh = directories - self._wanted
        self._wanted = directories
        if self._inotify is not None:
            self._settle(self._inotify, fresh)

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled; `started` once no later change can be missed."""
        is_started = False

        def start() -> None:
            nonlocal is_started
            if not is_started:
                is_started = True
                task_status.started()

        self._inotify = inotify = await self._instance(start)
        try:
            self._settle(inotify, self._wanted)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._poll_for_ever, inotify)
                tasks.start_soon(read_in_turns, inotify.fileno(), partial(self._receive, inotify), self._beat)
                start()
        finally:
            inotify.close()
            self._inotify = None
            self._watched = _Watched()

    async def _instance(self, start: Callable[[], None]) -> Inotify:
        """An inotify instance; until one can be had, the directories are listed every `POLL` seconds."""
        while True:
            try:
                inotify = Inotify()
            except OSError as error:
                self._report_refusal(_EVERYTHING, error)
            else:
                self._refused.heal(_EVERYTHING)
                return inotify
            self._poll()
            start()
            self._beat()
            await asyncio.sleep(POLL)

    async def _poll_for_ever(self, inotify: Inotify) -> None:
        while True:
            await asyncio.sleep(POLL)
            if self._wanted - self._watched.directories.keys():
                self._settle(inotify, frozenset())  # what could not be watched may be by now
            self._poll()

    def _poll(self) -> None:
        """Report what came, went or changed since the listing before, in the directories that are not watched."""
        before = self._unwatched
        self._unwatched = {it: entries_of(it) for it in self._wanted - self._watched.directories.keys()}
        for directory, now in self._unwatched.items():
            if directory in before:
                for name, change in differences(before[directory], now):
                    self._on_change(directory / name, change)
            elif now is not None:
                self._on_change(directory, Change.CREATED)

    def _receive(self, inotify: Inotify) -> bool:
        """Read one batch; True if more may be waiting."""
        try:
            events, more = inotify.read()
        except BlockingIOError:
            return False
        moved = [self._take(wd, mask, name) for wd, mask, name in events]
        if any(moved):
            self._settle(inotify, frozenset())
        return more

    def _take(self, wd: int, mask: int, name: str) -> bool:
        """Report one event; True if wanted names may lead elsewhere now."""
        if mask & Q_OVERFLOW:
            self._on_overflow()
            return True
        if mask & IGNORED:  # the directory is gone, or unmounted
            return wd in self._watched.on_the_way or wd in self._watched.aliases
        change = Change.CREATED if mask & _APPEARED else Change.REMOVED if mask & _VANISHED else Change.CHANGED
        if name:
            for directory in self._watched.aliases.get(wd, ()):
                self._on_change(directory / name, change)
        led_to = self._watched.on_the_way.get(wd, {}).get(name, frozenset())
        if change is Change.REMOVED:
            self._vanished |= led_to  # even if the same one is back when we look
        return change is not Change.CHANGED and bool(led_to)

    def _settle(self, inotify: Inotify, fresh: frozenset[Path]) -> None:
        """Find out where the wanted names lead now, watch that, and report what came and went."""
        before, now = self._watched, self._look(inotify)
        # Only what is resolved after its watches were made can be trusted: a later change is an event.
        while (again := self._look(inotify)) != now:
            now = again
        self._watched = now
        vanished, self._vanished = self._vanished, set()
        for wd in {*before.aliases, *before.on_the_way} - {*now.aliases, *now.on_the_way}:
            with suppress(OSError):  # the kernel has dropped it with its directory
                inotify.rm_watch(wd)
        changed = sorted(
            d for d in self._wanted if d in vanished or before.directories.get(d) != now.directories.get(d)
        )
        for directory in changed:
            if directory in before.directories:
                self._on_change(directory, Change.REMOVED)
        for directory in changed:
            if directory in now.directories:
                self._appeared(directory, with_entries=directory not in fresh)

    def _look(self, inotify: Inotify) -> _Watched:
        """Resolve the wanted names as they are now, and watch every directory that this depended on."""
        trails = {directory: trail(directory) for directory in sorted(self._wanted)}
        ends = {found.end for found in trails.values() if found.end is not None}
        places = sorted({place for found in trails.values() for place, _ in found.steps} | ends)
        self._refused.heal(*sorted(self._refused.keys() - set(places)))
        wds = {place: self._add(inotify, place, _WANTED if place in ends else _ON_THE_WAY) for place in places}
        directories: dict[Path, int] = {}
        aliases: dict[int, tuple[Path, ...]] = {}
        on_the_way: dict[int, dict[str, frozenset[Path]]] = {}
        for directory, found in trails.items():
            for place, name in found.steps:
                if (wd := wds[place]) is not None:
                    names = on_the_way.setdefault(wd, {})
                    names[name] = names.get(name, frozenset()) | {directory}
            if found.end is not None and (wd := wds[found.end]) is not None:
                directories[directory] = wd
                aliases[wd] = (*aliases.get(wd, ()), directory)
        return _Watched(directories, aliases, on_the_way)

    def _add(self, inotify: Inotify, place: str, mask: int) -> int | None:
        """The descriptor of a directory, or None if it cannot be watched."""
        try:
            wd = inotify.add_watch(place, mask | _OPTIONS)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # those: it vanished in this moment
                self._report_refusal(place, error)
            return None
        self._refused.heal(place)
        return wd

    def _report_refusal(self, place: str, error: OSError) -> None:
        advice = f"it is looked at every {POLL:g} s"
        if error.errno in (errno.ENOSPC, errno.EMFILE):
            what = "watches" if error.errno == errno.ENOSPC else "instances"
            advice += f"; raise fs.inotify.max_user_{what}"
        self._refused[place].report_once(os.strerror(error.errno or 0), then=advice)

    def _appeared(self, directory: Path, *, with_entries: bool) -> None:
        self._on_change(directory, Change.CREATED)
        if with_entries:
            with suppress(OSError):  # it vanished again: an event says so
                for name in os.listdir(directory):  # noqa: PTH208  # strings are enough
                    self._on_change(directory / name, Change.CREATED)


class PathSource:
    """Changes in the host's directories, as hints where to look."""

    def __init__(self, emit: Emit, host: Host, beat: Beat = unwatched, problems: Problems | None = None) -> None:
        self._emit = emit
        self._host = host
        self._names: dict[Path, HostPath] = {}
        self._directories = DirectoryWatch(self._on_change, self._on_overflow, beat, problems)

    def watch(self, directories: frozenset[HostPath]) -> None:
        """Watch these and no others; they need not exist."""
        self._names = {self._host.local(directory): directory for directory in directories}
        self._directories.watch(frozenset(self._names))

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """As `DirectoryWatch.run`."""
        await self._directories.run(task_status=task_status)

    def _on_change(self, path: Path, _change: Change) -> None:
        name = self._names.get(path)
        self._emit(PathChange(name or self._names[path.parent] / path.name))

    def _on_overflow(self) -> None:
        self._emit(Resync("the kernel dropped changes of directories because too many were waiting"))


# --- one file, whatever symbolic links lead to it ---


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
        """Whether the file, or a link to it, was replaced or written after this time, in seconds since 1970."""
        for place, name in trail(self._file).steps:
            try:
                found = Path(place, name).lstat()
            except OSError:
                continue
            if found.st_ctime > time and not S_ISDIR(found.st_mode):
                return True
        return False
