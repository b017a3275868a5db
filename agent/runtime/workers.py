"""Keeps work off the event loop: what blocks runs in daemon threads, and what takes long in short steps of the loop.

Each backend has a few threads, so that a call that hangs costs one: library pools (asyncio's, anyio's) share their limit and
keep the process from exiting meanwhile. For work on thousands of devices a thread would not do: it would read what the loop
changes, and take every second moment of the interpreter from it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice
from typing import Any, Final, TypeVar

from agent.runtime.errors import shown

T = TypeVar("T")

LIMIT: Final = 4
"""Threads for one kind of call, where nothing else is said. While all of them hang, no such call is made."""

SLICE: Final = 0.001
"""Seconds after which other tasks have their turn."""

BATCH: Final = 100
"""Devices, or claims, whose state is changed in one step of the loop: 100 us each at most make 10 ms."""


# --- threads ---


class NoWorkerError(Exception):
    """Every thread of this backend hangs in a call, or the system has none to give; the message says which."""


class AllBusyError(NoWorkerError):
    """Every thread of this backend hangs in a call."""


_Job = tuple[Callable[[], Any], "asyncio.Future[Any]", asyncio.AbstractEventLoop]
_Jobs = queue.SimpleQueue[_Job | None]
"""The calls handed to one thread, one at a time; None ends it."""


class Workers:
    """Up to `limit` daemon threads, made when first needed; one that has nothing to do is kept for the next call."""

    def __init__(self, name: str, limit: int = LIMIT) -> None:
        self._name = name
        self._limit = limit
        self._idle: list[_Jobs] = []
        self._threads = 0
        self._closed = False

    @property
    def spare(self) -> bool:
        """Whether at least half of the threads are free, so that what hangs may be tried once more."""
        return self._threads * 2 <= self._limit

    def start(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a blocking call in a thread. To give up waiting, drop the future.

        Raises:
            NoWorkerError: all threads are busy, or no more can be had.
        """
        self._closed = False
        jobs = self._idle.pop() if self._idle else self._one_more()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        jobs.put((call, future, loop))
        return future

    def _one_more(self) -> _Jobs:
        if self._threads >= self._limit:
            raise AllBusyError(f"all {self._limit} threads of {self._name} hang")
        jobs: _Jobs = queue.SimpleQueue()
        name = f"{self._name}-{self._threads + 1}"
        try:
            threading.Thread(target=self._serve, args=(jobs,), name=name, daemon=True).start()
        except RuntimeError as error:  # the limit of a cgroup's or a user's tasks
            raise NoWorkerError(f"the system has no thread for {self._name}: {error}") from None
        self._threads += 1
        return jobs

    def close(self) -> None:
        """End the idle threads now, and the busy ones once they are back. `start` makes others."""
        self._closed = True
        for jobs in self._idle:
            jobs.put(None)
        self._threads -= len(self._idle)
        self._idle.clear()

    def _serve(self, jobs: _Jobs) -> None:
        while (job := jobs.get()) is not None:
            call, future, loop = job
            result, error = None, None
            try:
                result = call()
            except BaseException as caught:  # noqa: BLE001  # handed on, whatever a backend raises
                error = caught
            try:
                loop.call_soon_threadsafe(self._finish, jobs, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the process is ending
            del call, future, result, error, job

    def _finish(self, jobs: _Jobs, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        if self._idle or self._closed:  # calls mostly come one at a time; more threads were for slow ones
            jobs.put(None)
            self._threads -= 1
        else:
            self._idle.append(jobs)
        if future.done():
            return  # the caller does not wait any more
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(_of_call(error))


class OneAtATime:
    """Runs blocking calls in one thread. Those that come meanwhile are its next turn: to wake it takes as long as they do.

    While one hangs, the others wait; a call whose caller no longer waits is not begun.
    """

    def __init__(self, name: str) -> None:
        self._workers = Workers(name, limit=1)
        self._waiting: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._is_busy = False

    async def run(self, call: Callable[[], T]) -> T:
        """What a call gives, or raises.

        Raises:
            NoWorkerError: the system has no thread to give.
        """
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, done))
        if not self._is_busy:
            self._next()
        return await done

    def _next(self) -> None:
        turn = [(call, done) for call, done in self._waiting if not done.done()]
        self._waiting.clear()
        if not turn:
            return
        try:
            running = self._workers.start(lambda: [_outcome(call) for call, _ in turn])
        except NoWorkerError as error:
            for _, done in turn:
                done.set_exception(error)
            return
        self._is_busy = True
        running.add_done_callback(lambda it: self._finish([done for _, done in turn], it.result()))

    def _finish(self, turn: list[asyncio.Future[Any]], outcomes: list[tuple[Any, Exception | None]]) -> None:
        self._is_busy = False
        for done, (result, error) in zip(turn, outcomes, strict=True):
            if not done.done():
                if error is None:
                    done.set_result(result)
                else:
                    done.set_exception(error)
        self._next()

    def close(self) -> None:
        """End the thread once it is back; `run` makes another."""
        self._workers.close()


def _outcome(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return call(), None
    except BaseException as error:  # noqa: BLE001  # handed on to the caller
        return None, _of_call(error)


def _of_call(error: BaseException) -> Exception:
    """What a call fails with: a StopIteration or SystemExit would do more than that."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"raised {shown(error)}")


# --- short steps ---


async def in_slices(pieces: Iterable[T]) -> list[T]:
    """The items of an iterable that computes them one by one; each must take far less than a slice."""
    made: list[T] = []
    until = time.perf_counter() + SLICE
    for piece in pieces:
        made.append(piece)
        if time.perf_counter() >= until:
            await asyncio.sleep(0)
            until = time.perf_counter() + SLICE
    return made


async def in_batches(items: Iterable[T], size: int = BATCH) -> AsyncIterator[list[T]]:
    """Yield the items in batches; other tasks run between two batches.

    It is for work that changes state: at the end of each batch that state is consistent, and the same items make the
    same batches on any machine.
    """
    left = iter(items)
    batch = list(islice(left, size))
    while batch:
        yield batch
        if batch := list(islice(left, size)):
            await asyncio.sleep(0)
