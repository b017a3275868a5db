from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.runtime.pacing import Backoff, Credit, Doorbell
from tests.wait import at_once, limit, settled

AT_ONCE, PERIOD = 3, 1.0


@given(st.lists(st.integers(0, 8), max_size=60))
def test_nobody_waits_longer_than_a_period_and_no_more_come_than_were_earned(pauses: list[int]) -> None:
    """Quarters of a period pass between two wishes; each is met as soon as it may."""
    credit, now = Credit(AT_ONCE, PERIOD), 1000.0
    times: list[float] = []
    for pause in pauses:
        now += pause / 4
        wait = max(0.0, credit.wait(now))
        assert wait <= PERIOD
        assert wait == 0 or times[-AT_ONCE] + AT_ONCE * PERIOD > now, "who waits has had all of it lately"
        now += wait
        credit.spend(now)
        times.append(now)
    for first, time in enumerate(times):
        for last in range(first, len(times)):
            assert last - first + 1 <= AT_ONCE + (times[last] - time) / PERIOD


def test_each_failure_in_a_row_is_waited_for_twice_as_long_up_to_a_limit() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    backoff.reset()
    assert [backoff.next(1.5), backoff.next(1.5), backoff.next()] == [1.0, 1.5, 1.5], "one that is soon over waits less"


def test_nodes_of_a_cluster_do_not_come_back_at_one_moment() -> None:
    assert Backoff(1.0, 5.0, chance=lambda: 0.5).next() == 1.5


async def test_a_ring_while_the_loop_is_busy_is_heard_once() -> None:
    bell = Doorbell()
    bell.set()
    bell.set()
    async with limit():
        await bell.rung()
    waiting = asyncio.create_task(bell.rung())
    await settled()
    assert not waiting.done(), "both rings were heard"
    bell.set()
    async with limit():
        await waiting


@pytest.mark.parametrize("reached", [False, True])
async def test_who_waits_for_something_learns_whether_it_came_in_time(*, reached: bool) -> None:
    assert await at_once(Doorbell().until(lambda: reached, 60.0)) is reached
    await at_once(Doorbell().rung(60.0))
