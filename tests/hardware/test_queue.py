from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies

from agent.hardware.jobs import LASTS, LINGERS, HardwareQueue
from agent.runtime.workers import NoWorkerError, Workers
from tests.wait import PATIENCE, limit, settled, until


async def take(
    turns: HardwareQueue, noted: list[str], name: str, things: str, body: Callable[[], asyncio.Event]
) -> None:
    async with turns.take(set(things)):
        noted.append(f"{name} acts")
        await body().wait()
    noted.append(f"{name} is done")


async def test_who_wants_the_same_hardware_waits_and_others_do_not() -> None:
    turns, noted, gate = HardwareQueue(), list[str](), asyncio.Event()
    tasks = [
        asyncio.ensure_future(take(turns, noted, name, things, lambda: gate))
        for name, things in {"first": "ab", "second": "bc", "other": "d", "third": "a"}.items()
    ]
    await until(lambda: len(noted) == 2)
    await settled()
    assert noted == ["first acts", "other acts"]
    assert turns.is_taken({"a", "x"})
    assert not turns.is_taken({"c"})
    gate.set()
    await asyncio.gather(*tasks)
    assert set(noted) == {
        f"{name} {does}" for name in ("first", "second", "third", "other") for does in ("acts", "is done")
    }
    assert noted.index("second acts") < noted.index("third acts"), "in the order in which they came"
    assert not turns.is_taken(set("abcd"))


async def test_a_body_that_raises_and_a_waiter_that_gives_up_leave_nothing_taken() -> None:
    turns, noted, gate = HardwareQueue(), list[str](), asyncio.Event()
    acting = asyncio.ensure_future(take(turns, noted, "acting", "a", lambda: gate))
    waiting = asyncio.ensure_future(take(turns, noted, "waiting", "a", lambda: gate))
    await settled()
    waiting.cancel()
    await settled()
    assert turns.is_taken({"a"})
    acting.cancel()
    await asyncio.wait([acting, waiting])
    assert not turns.is_taken({"a"})
    with pytest.raises(ZeroDivisionError):
        async with turns.take({"a"}):
            _ = 1 / 0
    assert not turns.is_taken({"a"})


@pytest.mark.parametrize("fails", [False, True])
async def test_a_turn_lasts_until_its_thread_is_back_though_nobody_waits(fails: bool) -> None:
    turns, workers = HardwareQueue(), Workers("toy", limit=1)
    entered, let_go = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        let_go.wait(PATIENCE)
        if fails:
            raise RuntimeError("nobody misses this")

    async def act() -> None:
        async with turns.take({"a"}) as turn:
            await turn.run(workers, hang)

    acting = asyncio.ensure_future(act())
    await until(entered.is_set)
    acting.cancel()
    await asyncio.wait([acting])
    assert turns.is_taken({"a"})
    let_go.set()
    async with limit("the turn ends"), turns.take({"a"}) as turn:
        assert await turn.run(workers, lambda: "again") == "again"
    workers.close()


async def test_nobody_complains_of_a_failure_whose_waiter_gives_up_in_the_same_turn() -> None:
    turns, workers = HardwareQueue(), Workers("toy", limit=1)
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    jobs: list[asyncio.Future[Any]] = [asyncio.get_running_loop().create_future()]
    workers.start = lambda _: jobs[0]  # type: ignore[assignment, method-assign]

    async def act() -> None:
        async with turns.take({"a"}) as turn:
            await turn.run(workers, lambda: None)

    acting = asyncio.ensure_future(act())
    await asyncio.sleep(0)
    jobs[0].set_exception(RuntimeError("nobody misses this"))
    acting.cancel()
    await asyncio.wait([acting])
    del acting
    jobs.clear()
    gc.collect()
    assert (complaints, turns.is_taken({"a"})) == ([], False)


async def test_a_call_that_finds_no_thread_gives_its_turn_back() -> None:
    turns, workers, let_go = HardwareQueue(), Workers("toy", limit=1), threading.Event()
    job = workers.start(let_go.wait)
    with pytest.raises(NoWorkerError):
        async with turns.take({"a"}) as turn:
            await turn.run(workers, lambda: None)
    assert not turns.is_taken({"a"})
    let_go.set()
    await job
    workers.close()


@given(strategies.lists(strategies.tuples(strategies.sets(strategies.sampled_from("abcd")), strategies.integers(0, 3))))
def test_whoever_comes_gets_a_turn_and_never_beside_another(wanted: list[tuple[set[str], int]]) -> None:
    acting: list[set[str]] = []

    async def act(turns: HardwareQueue, things: set[str], turns_of_the_loop: int) -> None:
        async with turns.take(things):
            assert all(things.isdisjoint(others) for others in acting)
            acting.append(things)
            for _ in range(turns_of_the_loop):
                await asyncio.sleep(0)
            acting.remove(things)

    async def all_of_them() -> None:
        turns = HardwareQueue()
        async with limit("everybody had a turn"):
            await asyncio.gather(*(act(turns, things, count) for things, count in wanted))

    asyncio.run(all_of_them())


async def test_an_act_may_show_its_effects_for_a_while_after_it_has_ended() -> None:
    now, workers = 100.0, Workers("test")
    turns = HardwareQueue(clock=lambda: now)
    assert not turns.have_effects()
    async with turns.take({"a"}) as longer:
        await longer.run(workers, lambda: None)
        async with turns.take({"b"}) as shorter:
            await shorter.run(workers, lambda: None)
            now += 2 * LINGERS
        now += 2 * LINGERS
        assert turns.have_effects()
    now += LINGERS - 0.1
    assert turns.have_effects()
    now += 0.2
    assert not turns.have_effects()
    workers.close()


async def test_an_act_that_hangs_or_moves_nothing_has_no_effects() -> None:
    now, workers = 100.0, Workers("test")
    turns = HardwareQueue(clock=lambda: now)
    async with turns.take({"a"}, moves=False) as turn:
        await turn.run(workers, lambda: None)
        assert not turns.have_effects()
    assert not turns.have_effects()
    async with turns.take({"a"}) as turn:
        await turn.run(workers, lambda: None)
        now += LASTS
        assert not turns.have_effects()
    workers.close()


async def test_a_turn_in_which_nothing_was_done_has_no_effects() -> None:
    turns = HardwareQueue(clock=lambda: 100.0)
    async with turns.take({"a"}):
        assert not turns.have_effects()
    assert not turns.have_effects()
