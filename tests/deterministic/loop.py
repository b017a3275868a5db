"""An event loop that runs several processes and their threads in turns that a seed decides, on a clock of its own.

Each process has a queue of its own, as its own event loop would have: what runs next is drawn among the processes that have
something to do and the threads that can go on. Time passes only when there is none: until the next timer. Sockets, pipes and
inotify are the kernel's: one thread alone uses them, so that they do the same twice. Threads are greenlets: they go on until
they wait for something, a queue, an event or the disk.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import math
import os
import zlib
from collections.abc import Callable
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import anyio
import anyio._backends._asyncio
import anyio.to_thread
import grpclib.server
from greenlet import getcurrent, greenlet

from tests.deterministic.machine import HARNESS, PROCESS, Machine, Process

T = TypeVar("T")

_MOST_TURNS: Final = 200_000
"""Turns in a row without time passing: the run does not come to rest."""


_LONGEST: Final = 7_200.0
"""Seconds that a run may last: some last 20 minutes."""


class LivelockError(Exception):
    """Something goes on for ever without any time passing."""


class _Numbered:
    """Has a number for its hash, in place of its address: a set of such is walked in the same order twice."""

    made = 0

    def __hash__(self) -> int:
        try:
            return self._number  # type: ignore[has-type,no-any-return]
        except AttributeError:
            _Numbered.made += 1
            self._number = _Numbered.made
            return self._number


class _Task(_Numbered, asyncio.Task[T]):
    """A task of a process."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        context = options.get("context")
        self.process = PROCESS.get() if context is None else context.get(PROCESS, HARNESS)
        super().__init__(*arguments, **options)
        self.process.tasks.add(self)


class _Scope(_Numbered, anyio._backends._asyncio.CancelScope):
    """A scope that sets of scopes may have."""


class Loop(asyncio.SelectorEventLoop):
    """The loop of all processes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.processes: list[Process] = [HARNESS]
        self.threads: list[Thread] = []  # that can go on
        self.graveyard: list[Any] = []
        """What killed processes had: nothing of it may run again, not even by being collected."""
        self.turns = self.order = 0
        self._since = 0  # turns since time passed
        self._ends = machine.now + _LONGEST
        self.pace = 0.0
        """Seconds at most that one turn takes."""
        super().__init__()
        self._ready: collections.deque[Any]
        self._scheduled: list[Any]
        self._selector: Any
        self._transports: dict[int, Any]
        self.set_task_factory(lambda loop, it, **options: _Task(it, loop=loop, **options))

    # --- what asyncio asks ---

    def time(self) -> float:
        return self.machine.now

    def _write_to_self(self) -> None:
        """Threads are ours: nobody has to be woken."""

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        context = copy_context()
        PROCESS.get().signals[sig] = lambda: self.call_soon(callback, *args, context=context)

    # --- turns ---

    def _run_once(self) -> None:
        self._sort()
        waiting = self._poll()
        choices: list[Any] = [it for it in self.processes if (it.ready or it in waiting) and not it.is_stopped]
        choices += [it for it in self.threads if not it.process.is_stopped]
        if not choices:
            self._let_time_pass()
            return
        self.turns += 1
        self._since += 1
        if self._since > _MOST_TURNS:
            raise LivelockError(f"no time passes: {choices}")
        random = self.machine.rng.random
        chosen = choices[int(random() * len(choices))] if len(choices) > 1 else choices[0]
        if self.pace:
            self.machine.now += self.pace * random()
            self._ripen()
        self.order = zlib.crc32(f"{self.machine.now} {chosen} {len(choices)}".encode(), self.order)
        if isinstance(chosen, Thread):
            self.threads.remove(chosen)
            chosen.go_on()
            return
        ready = chosen.ready
        for handle in waiting.get(chosen, ()):
            ready.append(handle)
        number = len(ready)
        if random() < 0.1:  # the kernel may take the processor away between two steps
            number = 1 + int(random() * number)
        while number and ready:
            number -= 1
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _sort(self) -> None:
        """Give each process what has been called soon."""
        ready = self._ready
        while ready:
            handle = ready.popleft()
            process = handle._context.get(PROCESS, HARNESS)
            if process.is_dead:
                self.graveyard.append(handle)
            else:
                process.ready.append(handle)

    def _poll(self) -> dict[Process, list[asyncio.Handle]]:
        """What sockets and files have for each process."""
        found: dict[Process, list[asyncio.Handle]] = {}
        for key, mask in sorted(self._selector.select(0), key=lambda it: it[0].fd):
            for bit, handle in zip((1, 2), key.data, strict=True):
                if mask & bit and handle is not None and not handle._cancelled:
                    found.setdefault(handle._context.get(PROCESS, HARNESS), []).append(handle)
        return found

    def _let_time_pass(self) -> None:
        timers = self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not timers:
            raise LivelockError("nothing is left to do, and nothing is due")
        self.machine.now = max(self.machine.now, timers[0]._when)
        self._since = 0
        if self.machine.now > self._ends:
            raise LivelockError("it comes to no end")
        self._ripen()

    def _ripen(self) -> None:
        timers, now = self._scheduled, self.machine.now
        while timers and timers[0]._when <= now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if not timer._cancelled:
                self._ready.append(timer)

    # --- processes ---

    def spawn(self, process: Process, work: Callable[[], Any]) -> asyncio.Task[Any]:
        """Run a coroutine function as the main task of a process."""
        context = copy_context()
        context.run(PROCESS.set, process)
        if process not in self.processes:
            self.processes.append(process)
        return context.run(lambda: self.create_task(work()))

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does: nothing of it runs any more, and what it had open is closed."""
        process.is_dead = True
        self.processes.remove(process)
        self._sort()
        kept = [it for it in self._scheduled if it._context.get(PROCESS) is not process]
        self.graveyard += [list(process.ready), self._scheduled, process]
        self.graveyard += [it for it in self.threads if it.process is process]
        process.ready.clear()
        self._scheduled = kept
        heapq.heapify(kept)
        self.threads = [it for it in self.threads if it.process is not process]
        self.graveyard += self.tasks_of(process)
        for key in list(self._selector.get_map().values()):
            if any(it is not None and it._context.get(PROCESS) is process for it in key.data):
                self.graveyard.append(key)
                self._selector.unregister(key.fd)
        for fd in list(self.machine.descriptors(process)):
            self._transports.pop(fd, None)
            os.close(fd)

    def tasks_of(self, process: Process) -> list[asyncio.Task[Any]]:
        """What of a process has not ended."""
        return [it for it in process.tasks if not it.done()]


# --- threads ---


class Thread:
    """Stands for `threading.Thread`: a greenlet that the loop lets go on."""

    def __init__(
        self, target: Callable[..., object], args: Any = (), name: str = "", daemon: bool | None = None
    ) -> None:
        self.name, self.process = name, PROCESS.get()
        self._greenlet = greenlet(lambda: target(*args))
        self._greenlet.gr_context = copy_context()
        self._greenlet.thread = self

    def __repr__(self) -> str:
        return f"{self.process} {self.name}"

    def start(self) -> None:
        if "no-threads" in self.process.faults:
            raise RuntimeError("can't start new thread")
        _loop().threads.append(self)

    def go_on(self) -> None:
        """Run it until it waits; called by the loop alone."""
        machine = _loop().machine
        machine.block = self._sleep
        try:
            self._greenlet.switch()
        finally:
            machine.block = None

    def wait(self) -> None:
        """Wait until `wake`; called by itself."""
        self._greenlet.parent.switch()

    def wake(self) -> None:
        if not self.process.is_dead and self not in (threads := _loop().threads):
            threads.append(self)

    def _sleep(self, seconds: float) -> None:
        timer = _loop().call_later(seconds, self.wake)
        self.wait()
        timer.cancel()


def this_thread() -> Thread | None:
    """The thread that calls; None: it is the event loop's."""
    return getattr(getcurrent(), "thread", None)


def _loop() -> Loop:
    return asyncio.get_running_loop()  # type: ignore[return-value]


class Event:
    """Stands for `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            thread.wake()
        self._waiting.clear()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        thread, loop = this_thread(), _loop()
        due = math.inf if timeout is None else loop.time() + timeout
        while not self.is_set() and loop.time() < due:
            assert thread is not None, "the event loop waits for a thread"
            self._waiting.append(thread)
            timer = None if due == math.inf else loop.call_at(due, thread.wake)
            thread.wait()
            if timer is not None:
                timer.cancel()
            if thread in self._waiting:
                self._waiting.remove(thread)
        return self.is_set()


class SimpleQueue:
    """Stands for `queue.SimpleQueue`."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._waiting: list[Thread] = []

    def __class_getitem__(cls, _: object) -> type[SimpleQueue]:
        return cls

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            self._waiting.pop(0).wake()

    def get(self) -> Any:
        thread = this_thread()
        assert thread is not None, "the event loop waits for a queue"
        while not self._items:
            self._waiting.append(thread)
            thread.wait()
        return self._items.popleft()


async def _in_a_thread(
    call: Callable[..., T],
    *arguments: Any,
    abandon_on_cancel: bool = False,
    cancellable: bool | None = None,
    limiter: Any = None,
) -> T:
    """Stands for `anyio.to_thread.run_sync`."""
    loop = _loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        try:
            result, error = call(*arguments), None
        except BaseException as caught:  # noqa: BLE001
            result, error = None, caught
        loop.call_soon_threadsafe(finish, result, error)

    Thread(target=run, name="pool").start()
    with anyio.CancelScope(shield=not (abandon_on_cancel or cancellable)):
        return await future
    raise AssertionError


def take_place() -> None:
    """From now on the agent and the simulated kubelet have these threads, and sets of a certain order."""
    from agent.daemon import state_file
    from agent.discovery import sources
    from agent.discovery.discoverer import Discoverer
    from agent.kubelet.server import Connection
    from agent.runtime import workers
    from agent.simulation.plugin_client import PluginClient

    threads = SimpleNamespace(Thread=Thread, Event=Event)
    for module in (workers, state_file, sources):
        module.threading = threads  # type: ignore[attr-defined]
    workers.queue = SimpleNamespace(SimpleQueue=SimpleQueue)  # type: ignore[assignment,attr-defined]
    anyio.to_thread.run_sync = _in_a_thread  # type: ignore[assignment]
    anyio._backends._asyncio.CancelScope = _Scope  # type: ignore[misc]
    for numbered in (PluginClient, Connection, grpclib.server.Handler, Discoverer):
        numbered.__hash__ = _Numbered.__hash__  # type: ignore[assignment,method-assign]
