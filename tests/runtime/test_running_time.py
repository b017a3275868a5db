from __future__ import annotations

import asyncio

import pytest

from agent.runtime.pacing import LATE, STEP, Running, running_timeout
from tests.wait import pass_time, settled


def test_time_in_which_nobody_asked_was_missed_but_for_what_a_busy_machine_may_take() -> None:
    now = [100.0]
    running = Running(now[0])
    for seconds, missed in ((STEP, 0.0), (STEP + LATE, 0.0), (60.0, 60.0 - STEP - LATE), (STEP, 60.0 - STEP - LATE)):
        now[0] += seconds
        assert running.missed(now[0]) == pytest.approx(missed)


async def test_a_deadline_comes_when_its_time_has_passed_for_us() -> None:
    async def wait() -> None:
        async with running_timeout(10.0, lambda: 0.0):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await settled()
    pass_time(10.0)
    with pytest.raises(TimeoutError):
        await waiting


async def test_a_deadline_waits_for_the_time_that_was_missed() -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    async def wait() -> None:
        async with running_timeout(10.0, lambda: loop.time()):
            await ended.wait()

    waiting = asyncio.create_task(wait())
    await settled()
    pass_time(60.0)  # for this clock, too: nobody ran
    await settled()
    assert not waiting.done()
    ended.set()
    await waiting
