"""Waits for conditions; the only place in the tests that may sleep or read the clock (tests/test_rules.py).

`until` waits for what must come, `limit` bounds an await, `settled` waits until nothing is left that could still come,
`pass_time` makes due what is due later, `at_once` does so for whatever an await waits for. None of them makes a slow
machine a failure.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, TypeVar

import anyio

T = TypeVar("T")

PATIENCE: Final = 300.0
"""Seconds. Only a bug reaches them: hundreds of times what anything here takes on an idle machine."""

_PAUSE: Final = 0.002  # seconds between two looks at a condition
_ROUNDS: Final = 3  # in a row without a sign of work
_TIMERS: Final = 1000  # that one await may wait for in `at_once`


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


async def until_told(ask: Callable[[], Awaitable[T]], holds: Callable[[T], object], what: str = "") -> None:
    """Ask until the answer is one for which the condition holds.

    Raises:
        TimeoutError: it never is.
    """
    async with limit(what):
        while not holds(await ask()):
            await asyncio.sleep(_PAUSE)


def block_until(holds: Callable[[], object], what: str = "", seen: Callable[[], object] | None = None) -> None:
    """`until` for a test or thread without an event loop."""
    end = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(_report(what, seen))
        time.sleep(_PAUSE)


@asynccontextmanager
async def limit(
    what: str = "", seen: Callable[[], object] | None = None, *, slower: float = 1.0
) -> AsyncIterator[None]:
    """End what is awaited inside if it never comes; `pass_time` does not bring that about.

    Args:
        what: what is awaited, in words.
        seen: what the report shows if it never comes, as it is then.
        slower: how many times longer it may take than anything on this machine, as in an emulated one.

    Raises:
        TimeoutError: it never came.
    """
    patience = PATIENCE * slower
    end, loop = time.monotonic() + patience, asyncio.get_running_loop()
    with anyio.CancelScope() as scope:
        timer = asyncio.Handle(int, (), loop)

        def look() -> None:
            nonlocal timer
            if time.monotonic() < end:
                timer = loop.call_later(end - time.monotonic(), look)
            else:
                scope.cancel()

        look()
        try:
            yield
        finally:
            timer.cancel()
    if scope.cancelled_caught:
        raise TimeoutError(_report(what, seen, patience))


def _report(what: str, seen: Callable[[], object] | None, patience: float = PATIENCE) -> str:
    last = f"; seen last: {seen()!r}" if seen else ""
    return f"not within {patience:g} s: {what or 'what was awaited'}{last}"


async def settled() -> None:
    """Wait until this process does nothing more unless time passes or somebody outside of it acts.

    Then the event loop has nothing to run, its sockets have nothing to read, and all other threads sleep. It asks the
    event loop itself, and the kernel for each thread (proc_pid_status(5): state, context switches); it does not guess
    from time: a thread that waits for a busy CPU is not asleep.

    Raises:
        TimeoutError: it does ever more.
    """
    quiet = 0
    before: Mapping[str, str] = {}
    async with limit("this process comes to rest", lambda: (asyncio.all_tasks(), _threads())):
        while quiet < _ROUNDS:
            while _has_work():
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)  # without the interpreter's lock, so that a thread that has work shows it
            now = _threads()
            quiet = quiet + 1 if now == before and _asleep(now) and not _has_work() else 0
            before = now


def _has_work() -> bool:
    """Whether the event loop has a callback to run, or a file that is ready. It has no public way to tell."""
    loop = asyncio.get_running_loop()
    return bool(loop._ready or loop._selector.select(0))  # type: ignore[attr-defined]


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
    if not isinstance(loop.time, _Ahead):
        loop.time = _Ahead(loop.time)  # type: ignore[method-assign]
    loop.time.seconds += seconds


class _Ahead:
    """An event loop's clock that is ahead."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self.seconds = 0.0

    def __call__(self) -> float:
        return self._time() + self.seconds


async def at_once(what: Awaitable[T]) -> T:
    """Await something; whenever this process can only wait, the time until the event loop's next timer passes.

    Not for what another process does: it is not waited for.

    Raises:
        TimeoutError: it never comes.
    """
    task = asyncio.ensure_future(what)
    try:
        for _ in range(_TIMERS):
            await settled()
            if task.done():
                return await task
            if (seconds := _until_next_timer()) is None:
                break
            pass_time(seconds)
        raise TimeoutError(f"whatever time passes, it does not end: {task!r}")
    finally:
        task.cancel()


def _until_next_timer() -> float | None:
    loop = asyncio.get_running_loop()
    due = [timer.when() for timer in loop._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
    return max(0.0, min(due) - loop.time()) if due else None
