"""Runs inside the daemon's process: times the steps of its event loop, and breaks things there when told to.

Orders are calls of this module's functions, written to a file that is open from the start, and announced by SIGUSR1;
answers are JSON lines of another file.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

_TOLD: Final = 0.02  # seconds of CPU time from which on a step is told of
_FULL: Final = 4096  # bytes that a pipe holds which nobody reads

_orders = _answers = -1
_excused = 0.0  # CPU time of the loop's thread that orders took
_passed = 0.0  # seconds that the monotonic clock is ahead
_stderr: list[int] = []  # while nobody reads it: the real one, the pipe's end
_broken: set[str] = set()


def install(directory: str) -> None:
    """To be called before anything of the daemon is imported."""
    global _orders, _answers
    _orders = os.open(f"{directory}/orders", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC)
    _answers = os.open(f"{directory}/answers", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    monotonic = time.monotonic
    time.monotonic = lambda: monotonic() + _passed
    asyncio.Handle._run = _timed(asyncio.Handle._run)  # type: ignore[method-assign]
    _make_breakable()
    signal.signal(signal.SIGUSR1, _obey)


def _obey(*_signal: object) -> None:
    global _excused
    began = time.thread_time()
    number, _, call = os.pread(_orders, 4096, 0).decode().partition(" ")
    answer: object
    try:
        answer = eval(call)
    except Exception as error:  # noqa: BLE001  # whoever ordered is told
        answer = repr(error)
    _tell(order=int(number), answer=answer)
    _excused += time.thread_time() - began


def _tell(**words: object) -> None:
    os.write(_answers, json.dumps(words).encode() + b"\n")


# --- the event loop ---


def _timed(run: Any) -> Any:
    def timed(handle: Any) -> None:
        began, wall, excused = time.thread_time(), time.perf_counter(), _excused
        run(handle)
        if (took := time.thread_time() - began - _excused + excused) > _TOLD:
            _tell(step=took, wall=time.perf_counter() - wall, name=_name(handle._callback))

    return timed


def _name(callback: Any) -> str:
    """A callback's name; of a task, its coroutine's, and where it waits now."""
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return str(getattr(callback, "__qualname__", callback))
    awaited: Any = task.get_coro()
    names = []
    while hasattr(awaited, "cr_await"):
        names.append(awaited.__qualname__)
        awaited = awaited.cr_await
    return " > ".join([names[0], *names[1:][-2:]]) if names else task.get_name()


# --- orders ---


def collect() -> int:
    """Collect garbage, so that the memory is what is in use."""
    return gc.collect()


def pass_time(seconds: float) -> None:
    """So many seconds pass at once, as on a machine that was suspended."""
    global _passed
    _passed += seconds


def block_log() -> None:
    """Make stderr a pipe that is full and that nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while os.write(writing, bytes(_FULL)):
            pass
    except BlockingIOError:
        os.set_blocking(writing, True)
    _stderr[:] = [os.dup(2), reading]
    os.dup2(writing, 2)
    os.close(writing)


def unblock_log() -> None:
    """Give stderr back, and let go on who writes to the pipe."""
    if _stderr:
        real, reading = _stderr
        os.dup2(real, 2)
        os.close(real)
        os.close(reading)  # whoever writes gets EPIPE, as where journald has ended
        _stderr.clear()


def break_(part: str) -> None:
    """From now on fails: `disk` (every fsync), `inotify` (every new watch), `log` (every line)."""
    _broken.add(part)


def mend(part: str) -> None:
    """It works again."""
    _broken.discard(part)


def _make_breakable() -> None:
    import structlog

    from agent.discovery.paths import Inotify

    def breakable(owner: Any, name: str, part: str, error: Exception) -> None:
        whole = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if part in _broken:
                raise type(error)(*error.args)  # one alone would keep the frames of all places where it has been raised
            return whole(*arguments, **options)

        setattr(owner, name, call)

    for name in ("fsync", "fdatasync"):
        breakable(os, name, "disk", OSError(errno.EIO, os.strerror(errno.EIO)))
    breakable(Inotify, "add_watch", "inotify", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    breakable(structlog.processors.TimeStamper, "__call__", "log", ZeroDivisionError("told to fail"))


def prepare(directory: str | Path) -> str:
    """The code of a process that runs the daemon so."""
    return f"from tests.soak import inside; inside.install({str(directory)!r})"
