from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from agent.runtime.workers import NoWorkerError, OneAtATime, Workers
from tests.wait import PATIENCE, until


class Hang:
    """A call that hangs until it is let go."""

    def __init__(self, result: Callable[[], object] = lambda: "done") -> None:
        self.entered, self._let_go, self._result = threading.Event(), threading.Event(), result

    def __call__(self) -> object:
        self.entered.set()
        assert self._let_go.wait(PATIENCE)
        return self._result()

    def let_go(self) -> None:
        self._let_go.set()


async def test_a_call_runs_in_a_daemon_thread_with_the_backends_name() -> None:
    thread = await Workers("gpu").start(threading.current_thread)
    assert thread.daemon
    assert thread.name == "gpu-1"


async def test_an_idle_thread_is_used_again() -> None:
    workers = Workers("gpu")
    first = await workers.start(threading.get_ident)
    assert await workers.start(threading.get_ident) == first


async def test_when_all_threads_hang_no_call_is_taken_until_one_comes_back() -> None:
    workers, hangs = Workers("gpu", limit=2), [Hang(), Hang()]
    jobs = [workers.start(hang) for hang in hangs]
    with pytest.raises(NoWorkerError, match="all 2 threads of gpu hang"):
        workers.start(lambda: None)
    hangs[0].let_go()
    assert await jobs[0] == "done"
    assert await workers.start(lambda: "again") == "again"
    hangs[1].let_go()
    await jobs[1]


async def test_an_exception_is_handed_on_as_it_is() -> None:
    error = LookupError("x")

    def fail() -> None:
        raise error

    with pytest.raises(LookupError) as caught:
        await Workers("gpu").start(fail)
    assert caught.value is error


@pytest.mark.parametrize("error", [StopIteration(1), SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
async def test_what_would_do_more_than_fail_the_call_fails_the_call_alone(error: BaseException) -> None:
    def fail() -> None:
        raise error

    workers = Workers("gpu")
    with pytest.raises(RuntimeError, match="raised "):
        await workers.start(fail)
    assert await workers.start(lambda: "well") == "well"


async def test_the_result_of_a_call_that_was_given_up_is_dropped_and_its_thread_used_again() -> None:
    workers, hang = Workers("gpu", limit=1), Hang(lambda: 1 / 0)
    job = workers.start(hang)
    job.cancel()
    hang.let_go()
    await until(lambda: workers._idle)
    assert await workers.start(lambda: "again") == "again"


async def test_closed_workers_end_their_idle_threads_and_can_start_again() -> None:
    workers = Workers("gpu", limit=1)
    for _ in range(3):
        thread = await workers.start(threading.current_thread)
        workers.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()


async def test_a_thread_that_comes_back_after_the_end_ends_too() -> None:
    workers, hang, threads = Workers("gpu", limit=1), Hang(), set(threading.enumerate())
    job = workers.start(hang)
    (thread,) = set(threading.enumerate()) - threads
    workers.close()
    hang.let_go()
    assert await job == "done"
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert await workers.start(lambda: "again") == "again"


async def test_a_system_that_has_no_thread_to_give_is_told_of_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    workers = Workers("gpu", limit=1)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(NoWorkerError, match="the system has no thread for gpu: can't start new thread"):
            workers.start(lambda: None)
    assert await workers.start(lambda: "again") == "again"


def test_a_loop_that_closes_under_a_call_costs_nothing() -> None:
    hang = Hang()

    async def begin() -> None:
        Workers("closing").start(hang)
        await asyncio.sleep(0)

    asyncio.run(begin())
    assert hang.entered.wait(PATIENCE)
    thread = next(t for t in threading.enumerate() if t.name == "closing-1" and t.is_alive())
    hang.let_go()
    thread.join(PATIENCE)
    assert not thread.is_alive()


async def test_calls_that_come_while_one_runs_are_one_turn_of_its_thread_and_each_has_its_own_outcome() -> None:
    calls, hang = OneAtATime("disk"), Hang()

    def fail() -> None:
        raise LookupError("x")

    first = asyncio.ensure_future(calls.run(hang))
    await until(hang.entered.is_set)
    ran = list[str]()
    given_up = asyncio.ensure_future(calls.run(lambda: ran.append("given up")))
    others = [asyncio.ensure_future(calls.run(it)) for it in (threading.get_ident, fail, threading.get_ident)]
    await asyncio.sleep(0)
    given_up.cancel()
    assert not any(it.done() for it in others)
    hang.let_go()
    one, error, other = await asyncio.gather(*others, return_exceptions=True)
    assert (await first, one, ran) == ("done", other, [])
    assert isinstance(error, LookupError)
    for wild in (SystemExit, StopIteration):  # more than an error of one call
        with pytest.raises(RuntimeError, match=wild.__name__):
            await calls.run(raising(wild))
    assert await calls.run(threading.get_ident) == one
    calls.close()


def raising(error: type[BaseException]) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call
