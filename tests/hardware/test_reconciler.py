from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import anyio
import pytest
from structlog.testing import capture_logs

from agent.hardware import reconciler
from agent.hardware.jobs import HardwareQueue
from agent.hardware.reconciler import Reconciler, Want
from agent.runtime.workers import LIMIT, Workers
from tests.background import running
from tests.wait import PATIENCE, pass_time, settled, until


class House:
    """A reconciler, and what was tried."""

    def __init__(self) -> None:
        self.it = Reconciler(HardwareQueue())
        self.tried: list[str] = []

    def want(self, key: str, attempt: Callable[[Workers], Awaitable[bool]], lane: str = "adopt vfio") -> None:
        async def note(workers: Workers) -> bool:
            self.tried.append(key)
            return await attempt(workers)

        trouble = partial(self.it.problems.trouble, "adoption", f"{key} does not work", "not-adopted")
        self.it.want(key, Want(lane, note, trouble))

    def running(self) -> AbstractAsyncContextManager[None]:
        return running(self.it.run)


async def works(_workers: Workers) -> bool:
    return True


async def calls(workers: Workers) -> bool:
    return await workers.start(lambda: True)


async def fails(_workers: Workers) -> bool:
    raise ZeroDivisionError


@pytest.fixture
def house() -> House:
    return House()


async def test_what_hangs_while_it_is_made_ready_keeps_no_other_hardware_from_being_given_back(house: House) -> None:
    gate = threading.Event()

    async def hangs(workers: Workers) -> bool:
        return await workers.start(lambda: gate.wait(PATIENCE))

    async with house.running():
        for number in range(2 * LIMIT):
            house.want(f"adopted {number}", hangs)
        await until(lambda: len(house.tried) == LIMIT)
        house.want("released", works, "release vfio")
        await until(lambda: "released" in house.tried)
        assert len(house.tried) == LIMIT + 1
        gate.set()
        await settled()


async def test_that_all_threads_hang_is_a_problem_though_what_hangs_in_them_has_left(house: House) -> None:
    gate = threading.Event()

    async def hangs(workers: Workers) -> bool:
        workers.start(lambda: gate.wait(PATIENCE))
        raise TimeoutError("it hangs")

    with capture_logs() as logs:
        async with house.running():
            for number in range(LIMIT):
                house.want(f"{number}", hangs)
            await until(lambda: len(house.it.troubled) == LIMIT)
            for number in range(LIMIT):
                house.it.drop(f"{number}")
            house.want("x", calls)
            await until(lambda: bool(house.it.problems.lasting()))
            gate.set()
            await settled()
            pass_time(1.0)
            await settled()
            assert house.it.problems.lasting() == []
    told = [line["event"] for line in logs if line["event"].startswith("hardware-")]
    assert told == ["hardware-waits", "hardware-goes-on"]


async def test_hanging_threads_are_no_problem_where_nothing_waits_for_them_any_more(house: House) -> None:
    gate = threading.Event()

    async def hangs(workers: Workers) -> bool:
        workers.start(lambda: gate.wait(PATIENCE))
        return True

    with capture_logs():
        async with house.running():
            for number in range(LIMIT):
                house.want(f"{number}", hangs)
            await settled()
            house.want("x", calls)
            await until(lambda: bool(house.it.problems.lasting()))
            house.it.drop("x")
            pass_time(1.0)
            await until(lambda: not house.it.problems.lasting())
            gate.set()


async def test_a_device_that_changed_is_tried_at_once_however_often_it_failed_before(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "RETRY_FIRST", 1000.0)
    with capture_logs():
        async with house.running():
            house.want("x", fails)
            await until(lambda: bool(house.it.troubled))
            await settled()
            assert house.tried == ["x"]
            house.want("x", works)
            await settled()
    assert house.it.problems.lasting() == []


async def test_a_device_that_changes_while_it_is_being_made_ready_is_tried_once_more_and_not_at_the_same_time(
    house: House,
) -> None:
    entered, go_on = anyio.Event(), anyio.Event()

    async def waits(_workers: Workers) -> bool:
        entered.set()
        await go_on.wait()
        return True

    async with house.running():
        with capture_logs():
            house.want("x", fails)
            await until(lambda: bool(house.it.troubled))
        house.want("x", waits)
        await entered.wait()
        tried = len(house.tried)
        pass_time(reconciler.RETRY_MOST)  # when it would have been tried again for what failed
        house.want("x", works)
        await settled()
        assert len(house.tried) == tried
        go_on.set()
        await settled()
    assert len(house.tried) == tried + 1


async def test_its_threads_end_when_nothing_is_left_to_be_done(house: House) -> None:
    before = threading.active_count()
    async with house.running():
        for number in range(10):
            house.want(f"{number}", calls)
        await settled()
        await until(lambda: threading.active_count() <= before, "the end of the threads")
