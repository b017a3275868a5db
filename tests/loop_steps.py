"""A watchdog of an event loop, for tests: what each step of it costs, in CPU time of the loop's thread.

It is the CPU time that a step runs, not the time until it ends: on a busy machine a step waits for a CPU, which is no
fault of the step's. Still it is a measure, and differs between machines: a test that must never fail by chance counts
instead (tests.work).
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.work import work

NOTED: Final = 0.005
"""Seconds of the shortest step that is noted in a process's report."""


@dataclass(slots=True)
class Steps:
    """The steps of the loop so far."""

    longest: float = 0.0
    """What the most costly one cost: seconds, or byte-codes."""
    what: str = ""
    """What ran in it."""
    number: int = 0
    costs: list[tuple[float, str]] = field(default_factory=list)


@contextmanager
def watched(*, counted: bool = False) -> Iterator[Steps]:
    """Note the steps of every event loop of this process meanwhile; `counted`: byte-codes, not seconds."""
    steps, run = Steps(), asyncio.Handle._run

    def step(handle: asyncio.Handle) -> None:
        what = _name(handle)
        if counted:
            cost: float = work(functools.partial(run, handle))
        else:
            began = time.thread_time()
            run(handle)
            cost = time.thread_time() - began
        steps.number += 1
        if cost > steps.longest:
            steps.longest, steps.what = cost, what

    asyncio.Handle._run = step  # type: ignore[method-assign, assignment]
    try:
        yield steps
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


def _name(handle: asyncio.Handle) -> str:
    """Which callback, or which coroutine of a task, and where it is."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return getattr(task.get_coro(), "__qualname__", "") + _awaited(task)
    while isinstance(callback, functools.partial):
        callback = callback.func
    return getattr(callback, "__qualname__", repr(callback))


def _awaited(task: asyncio.Task[Any]) -> str:
    """The innermost coroutine of ours, since the outermost is the supervision of a part."""
    coro: Any = task.get_coro()
    names = []
    while coro is not None and hasattr(coro, "cr_await"):
        names.append(coro.__qualname__)
        coro = coro.cr_await
    return f" > {' > '.join(names[-3:])}" if names else ""


def report(file: str) -> None:
    """Have this process, whose loop is still to start, add each step of `NOTED` and more to the file, a line of JSON each."""
    out, run = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), asyncio.Handle._run

    def step(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        what = _name(handle)
        run(handle)
        if (cost := time.thread_time() - began) >= NOTED:
            os.write(out, json.dumps([cost, what]).encode() + b"\n")

    asyncio.Handle._run = step  # type: ignore[method-assign, assignment]


def reported(file: Path) -> list[tuple[float, str]]:
    """What a process has noted so far."""
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
