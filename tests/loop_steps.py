"""A watchdog of an agent's event loop: what the costly steps of it cost, in CPU time of the loop's thread or in byte-codes.

A step is all that runs between two turns of the loop: as long as it lasts, no pod gets a device. CPU time, unlike the
time until its end, is the step's own and not that of who else runs on the machine; but it differs between machines, and
between two runs. So bench/ measures it, and tests count byte-codes, which are the same everywhere.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.work import work

_SECONDS: Final = 0.005
SLOWER: Final = 20.0
"""How many times longer a loop takes whose byte-codes are counted."""
_BYTE_CODES: Final = 20_000  # about as many as in 1 ms; what C does in one of them is not seen


class Step(NamedTuple):
    """A step that was long enough to be noted."""

    cost: float
    """Seconds, or byte-codes."""
    what: str
    """The callback, or the task's innermost coroutines."""


def report(file: str, *, counted: bool = False) -> None:
    """Have this process, whose loop is still to start, add each costly step to the file: to be called in a prelude.

    Args:
        file: where to.
        counted: what byte-codes they run, not how long they last; the loop is `SLOWER` then.
    """
    out, run = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), asyncio.Handle._run

    def step(handle: asyncio.Handle) -> None:
        what = _name(handle)  # it may be another one afterwards
        if counted:
            cost, least = float(work(functools.partial(run, handle))), float(_BYTE_CODES)
        else:
            began = time.thread_time()
            run(handle)
            cost, least = time.thread_time() - began, _SECONDS
        if cost >= least:
            os.write(out, json.dumps([cost, what]).encode() + b"\n")

    asyncio.Handle._run = step  # type: ignore[method-assign, assignment]


def reported(file: Path) -> list[Step]:
    """What a process has noted so far."""
    return [Step(*json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def _name(handle: asyncio.Handle) -> str:
    callback: Any = handle._callback  # type: ignore[attr-defined]
    while isinstance(callback, functools.partial):
        callback = callback.func
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return getattr(callback, "__qualname__", repr(callback))
    names = list[str]()
    awaited: Any = task.get_coro()
    while hasattr(awaited, "cr_await"):
        names.append(awaited.__qualname__)
        awaited = awaited.cr_await
    return " > ".join(names[-4:])
