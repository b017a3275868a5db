"""Waits for conditions; the only place in the tests that may sleep or read the clock (tests/test_rules.py).

`until` waits for what must come, `limit` bounds an await, `settled` waits until nothing is left that could still come,
`pass_time` makes due what is due later. None of them makes a slow machine a failure.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio

PATIENCE: Final = 120.0
"""Seconds. Only a bug reaches them: hundreds of times what anything here takes on an idle machine."""

_PAUSE: Final = 0.002  # seconds between two looks at a condition
_ROUNDS: Final = 3  # in a row without a sign of work


async def until(holds: Callable[[], object], what: str = "", seen: Callable[[], object] | None = None) -> None:
    """Wait until a condition holds that no event tells of.

    Args:
        holds: the condition.
        what: the condition in words.
        seen: what the report shows if it never holds, as it is then.

    Raises:
        TimeoutError: it never holds.
    """
    async with limit(what, seen):
        while not holds():
            await asyncio.sleep(_PAUSE)


def block_until(holds: Callable[[], object], what: str = "", seen: Callable[[], object] | None = None) -> None:
    """`until` for a test or thread without an event loop."""
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(_report(what, seen))
        time.sleep(_PAUSE)


@asynccontextmanager
async def limit(what: str = "", seen: Callable[[], object] | None = None) -> AsyncIterator[None]:
    """End what is awaited inside if it never comes.

    Raises:
        TimeoutError: it never came; the message has `what`, and what `seen` returns then.
    """
    with anyio.move_on_after(PATIENCE) as scope:
        yield
    if scope.cancelled_caught:
        raise TimeoutError(_report(what, seen))


def _report(what: str, seen: Callable[[], object] | None) -> str:
    last = f"; seen last: {seen()!r}" if seen else ""
    return f"not within {PATIENCE:g} s: {what or 'what was awaited'}{last}"


async def settled() -> None:
    """Wait until this process does nothing more unless time passes or somebody outside of it acts.

    Then the event loop has nothing to run, its sockets have nothing to read, and all other threads sleep. It tells that
    from the kernel's word on each thread (proc_pid_status(5): state, context switches), not from time: a thread that
    waits for a busy CPU is not asleep.
    """
    quiet = 0
    before: Mapping[str, str] = {}
    while quiet < _ROUNDS:
        for _ in range(20):  # callbacks of callbacks, and sockets between them
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)  # without the interpreter's lock, so that a thread that has work shows it
        now = _threads()
        quiet = quiet + 1 if now == before and _asleep(now) else 0
        before = now


def _threads() -> Mapping[str, str]:
    """Of each other thread of this process: its state and how often it has been switched away from."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                lines = (task / "status").read_text().splitlines()
                found[task.name] = " ".join(line for line in lines if line.startswith(("State:", "volun", "nonvol")))
    return found


def _asleep(threads: Mapping[str, str]) -> bool:
    return all(state.split()[1] == "S" for state in threads.values())


def pass_time(seconds: float) -> None:
    """What is due within so many seconds on the running event loop is due now, in its order."""
    loop = asyncio.get_running_loop()
    earlier = loop.time
    loop.time = lambda: earlier() + seconds  # type: ignore[method-assign]
