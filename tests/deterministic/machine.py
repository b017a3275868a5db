"""The machine beneath a simulated run: its clock, its chance, its processes, and what of the kernel must not differ twice.

Import this before anything of the agent: a default argument `clock=time.monotonic` is taken when its module is imported.
Without a run (`MACHINE` is None) everything is as it was.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final
from weakref import WeakSet

BOOTED: Final = 1_900_000_000.0
"""Seconds since the epoch at which the run's monotonic clock was 0."""

REAL_TIME: Final = time.monotonic


class Process:
    """One process of the run: the kubelet's, an agent's, or the one that acts on both."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self.ready: deque[Any] = deque()
        """Handles that its event loop has to run, in their order."""
        self.is_stopped = self.is_dead = False
        self.tasks: WeakSet[Any] = WeakSet()
        self.signals: dict[int, Callable[[], object]] = {}
        self.faults: set[str] = set()
        """What fails for it: `disk-full`, `read-only`, `io-error`, `disk-slow`, `no-threads`, `no-watches`."""
        self.disk = ""
        """How the paths begin that are on the disk that fails."""

    def __repr__(self) -> str:
        return self.name


HARNESS: Final = Process("harness", 1)
PROCESS: ContextVar[Process] = ContextVar("process", default=HARNESS)


class Machine:
    """The clock and the chance of one run, and which process has which file."""

    def __init__(self, seed: int) -> None:
        self.now = 100.0
        self.wall_offset = 0.0
        self.rng = random.Random(seed)
        self.pids = 100
        self._owners: dict[int, tuple[Process, tuple[int, int]]] = {}
        self._changed: dict[tuple[int, int], list[int]] = {}  # inode → mtime, ctime in ns
        self.block: Callable[[float], None] | None = None
        """Lets the thread that calls wait; None: the event loop runs, which must not."""

    @property
    def wall_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return int((BOOTED + self.wall_offset + self.now) * 1e9)

    def process(self, name: str) -> Process:
        """A new one."""
        self.pids += 1
        return Process(name, self.pids)

    # --- descriptors ---

    def own(self, fd: int) -> None:
        """Note that this process has opened it."""
        found = _fstat(fd)
        self._owners[fd] = PROCESS.get(), (found.st_dev, found.st_ino)

    def disown(self, fd: int) -> None:
        """Note that it has closed it."""
        del self._owners[fd]

    def descriptors(self, process: Process) -> Iterator[int]:
        """What a process has open."""
        for fd, (owner, file) in list(self._owners.items()):
            if owner is process:
                try:
                    found = _fstat(fd)
                except OSError:
                    found = None
                if found is not None and (found.st_dev, found.st_ino) == file:
                    yield fd
                else:
                    del self._owners[fd]

    # --- times of files ---

    def touch(self, found: os.stat_result, *, content: bool = True) -> None:
        """The file with this status has changed now."""
        times = self._changed.setdefault((found.st_dev, found.st_ino), [self.wall_ns, 0])
        times[1] = self.wall_ns
        if content:
            times[0] = self.wall_ns

    def times(self, found: os.stat_result) -> list[int]:
        """When it changed; what nobody has changed yet was made now."""
        key = found.st_dev, found.st_ino
        if (times := self._changed.get(key)) is None:
            times = self._changed[key] = [self.wall_ns, self.wall_ns]
        return times

    def set_times(self, found: os.stat_result, mtime: int) -> None:
        """What utime(2) does."""
        self._changed[found.st_dev, found.st_ino] = [mtime, self.wall_ns]


MACHINE: Machine | None = None


def boot(seed: int) -> Machine:
    """From now on this process is that machine."""
    global MACHINE
    MACHINE = Machine(seed)
    random.seed(seed)
    return MACHINE


# --- time and chance ---

_perf_counter, _wall, _urandom, _getpid = time.perf_counter, time.time, os.urandom, os.getpid
_sleep = time.sleep


def _monotonic() -> float:
    return REAL_TIME() if MACHINE is None else MACHINE.now


def _pause(seconds: float) -> None:
    if MACHINE is None:
        _sleep(seconds)
    elif MACHINE.block is None:
        raise AssertionError(f"the event loop sleeps for {seconds} s")
    else:
        MACHINE.block(seconds)


time.monotonic = _monotonic
time.monotonic_ns = lambda: int(_monotonic() * 1e9)
time.perf_counter = lambda: _perf_counter() if MACHINE is None else MACHINE.now
time.time = lambda: _wall() if MACHINE is None else MACHINE.wall_ns / 1e9
time.time_ns = lambda: int(time.time() * 1e9)
time.sleep = _pause  # type: ignore[assignment]
os.urandom = lambda size: _urandom(size) if MACHINE is None else MACHINE.rng.randbytes(size)
os.getpid = lambda: _getpid() if MACHINE is None else PROCESS.get().pid

# --- files ---

_stat, _lstat, _fstat, _scandir = os.stat, os.lstat, os.fstat, os.scandir
_open, _write, _rename, _replace, _mkdir = os.open, os.write, os.rename, os.replace, os.mkdir
_fsync, _fdatasync, _utime = os.fsync, os.fdatasync, os.utime

SLOW: Final = (0.01, 0.2, 2.0)
"""Seconds of one access to a slow disk; the kubelet's record is one. To a kubelet that takes longer for it than
`agent.kubelet.plugin.REMEMBERED`, an ID that came back may be given before it has heard that it was away."""


class Status:
    """What the kernel says of a file, with the times of the run's clock."""

    __slots__ = ("_found", "_times")

    def __init__(self, found: os.stat_result, times: list[int]) -> None:
        self._found, self._times = found, (times[0], times[1])

    @property
    def st_mtime_ns(self) -> int:
        return self._times[0]

    @property
    def st_mtime(self) -> float:
        return self._times[0] / 1e9

    @property
    def st_ctime_ns(self) -> int:
        return self._times[1]

    @property
    def st_ctime(self) -> float:
        return self._times[1] / 1e9

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def __getitem__(self, index: int) -> Any:
        return self._found[index]


class _Entry:
    """An entry of a directory, with such a status."""

    __slots__ = ("_entry", "name", "path")

    def __init__(self, entry: Any) -> None:
        self._entry, self.name, self.path = entry, entry.name, entry.path

    def stat(self, *, follow_symlinks: bool = True) -> Any:
        return _timed(self._entry.stat(follow_symlinks=follow_symlinks))

    def __fspath__(self) -> Any:
        return self._entry.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


class _Entries:
    """What os.scandir returns: names in their order, since a file system may have any."""

    def __init__(self, place: Any) -> None:
        with _scandir(place) as entries:
            self._entries = iter(sorted(map(_Entry, entries), key=lambda it: it.name))

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def close(self) -> None:
        pass


def _timed(found: os.stat_result) -> Any:
    return found if MACHINE is None or not stat.S_IFMT(found.st_mode) else Status(found, MACHINE.times(found))


def _fails(*faults: str, path: Any = None) -> str:
    """Which of these a process' disk does now, if any."""
    if MACHINE is None or not (has := (process := PROCESS.get()).faults):
        return ""
    if path is not None and not os.fspath(path).startswith(process.disk):
        return ""
    return next((it for it in faults if it in has), "")


def _checked(*faults: str, path: Any = None) -> None:
    """Fail, or take time, as the disk does now."""
    import errno

    numbers = {"disk-full": errno.ENOSPC, "read-only": errno.EROFS, "io-error": errno.EIO}
    if fault := _fails(*faults, path=path):
        raise OSError(numbers[fault], os.strerror(numbers[fault]))
    if MACHINE is not None and MACHINE.block is not None and _fails("disk-slow", path=path):
        MACHINE.block(MACHINE.rng.choice(SLOW))


def _opening(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    if MACHINE is not None and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _checked("read-only", *(["disk-full"] if flags & os.O_CREAT and not os.path.lexists(path) else []), path=path)
    fd = _open(path, flags, mode, dir_fd=dir_fd)
    if MACHINE is not None:
        MACHINE.own(fd)
        if flags & os.O_CREAT:
            MACHINE.times(_fstat(fd))
    return fd


def _writing(fd: int, data: Any) -> int:
    if MACHINE is not None:
        _checked("read-only", "io-error")
        if _fails("disk-full") and len(data) > 1:
            return _write(fd, bytes(data)[: MACHINE.rng.randrange(1, len(data))])
    return _write(fd, data)


def _syncing(sync: Callable[[int], None]) -> Callable[[int], None]:
    def syncing(fd: int) -> None:
        if MACHINE is None:
            sync(fd)
        else:
            _checked("io-error")

    return syncing


def _moving(move: Callable[..., None]) -> Callable[..., None]:
    def moving(source: Any, target: Any, **options: Any) -> None:
        if MACHINE is not None:
            _checked("read-only", path=target)
        move(source, target, **options)
        if MACHINE is not None:
            MACHINE.touch(
                _lstat(target, **{k: v for k, v in {"dir_fd": options.get("dst_dir_fd")}.items() if v}), content=False
            )

    return moving


def _making(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
    if MACHINE is not None and not os.path.lexists(path):
        _checked("read-only", "disk-full", path=path)
    _mkdir(path, mode, dir_fd=dir_fd)


def _dating(path: Any, times: Any = None, *, ns: Any = None, **options: Any) -> None:
    if ns is None:
        _utime(path, times, **options)
    else:
        _utime(path, ns=ns, **options)
    if MACHINE is not None:
        mtime = ns[1] if ns else int(times[1] * 1e9) if times else MACHINE.wall_ns
        MACHINE.set_times(_stat(path), mtime)


def _asking(ask: Callable[..., os.stat_result]) -> Callable[..., Any]:
    def asking(*arguments: Any, **options: Any) -> Any:
        found = ask(*arguments, **options)
        return found if MACHINE is None else Status(found, MACHINE.times(found))

    return asking


def _as_before(name: str, made: Any) -> None:
    """Put this into the place of a function of `os`, which some modules ask what it can do."""
    before = getattr(os, name)
    for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if before in able:
            able.add(made)
    setattr(os, name, made)


for _name, _made in {
    "stat": _asking(_stat),
    "lstat": _asking(_lstat),
    "fstat": _asking(_fstat),
    "scandir": lambda place=".": _scandir(place) if MACHINE is None else _Entries(place),
    "open": _opening,
    "write": _writing,
    "fsync": _syncing(_fsync),
    "fdatasync": _syncing(_fdatasync),
    "rename": _moving(_rename),
    "replace": _moving(_replace),
    "mkdir": _making,
    "utime": _dating,
}.items():
    _as_before(_name, _made)

_listdir = os.listdir
_as_before("listdir", lambda place=".": _listdir(place) if MACHINE is None else sorted(_listdir(place)))


# --- sockets and signals ---

_made_socket, _bind = socket.socket.__init__, socket.socket.bind


def _making_socket(self: socket.socket, *arguments: Any, **options: Any) -> None:
    _made_socket(self, *arguments, **options)
    if MACHINE is not None:
        MACHINE.own(self.fileno())


def _binding(self: socket.socket, address: Any) -> None:
    _bind(self, address)
    if MACHINE is not None and isinstance(address, str) and not address.startswith("\0"):
        MACHINE.touch(_lstat(address))


socket.socket.__init__ = _making_socket  # type: ignore[method-assign]
socket.socket.bind = _binding  # type: ignore[assignment,method-assign]


def send(process: Process, number: int) -> None:
    """Send a signal, as kill(2) does; SIGKILL is `Loop.kill`."""
    if number == signal.SIGSTOP:
        process.is_stopped = True
    elif number == signal.SIGCONT:
        process.is_stopped = False
    else:
        process.signals[number]()
