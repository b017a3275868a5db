from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import anyio
import pytest
from structlog.testing import capture_logs

from agent.runtime import watchdog
from agent.runtime.watchdog import supervise
from tests.wait import limit


class Enough(BaseException):
    """Ends a test's supervision; no Exception, so it goes through."""


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr(watchdog, "anyio", SimpleNamespace(sleep=sleep))
    return delays


class Part:
    """Ends each run as told, then is enough."""

    def __init__(self, *ends: Exception | None) -> None:
        self._ends: Iterator[Exception | None] = iter(ends)

    async def run(self) -> None:
        for end in self._ends:
            if end is not None:
                raise end
            return
        raise Enough


async def watched(*ends: Exception | None) -> list[tuple[str, str]]:
    with capture_logs() as logs, pytest.raises(Enough):
        await supervise("part", Part(*ends).run)
    return [(line["event"], line.get("reason", "")) for line in logs]


async def test_a_part_that_fails_is_started_again_a_little_later_each_time_up_to_a_limit(slept: list[float]) -> None:
    await watched(*[OSError("gone")] * 11)
    assert slept == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]


async def test_the_same_failure_is_said_once_and_another_one_too(slept: list[float]) -> None:
    said = await watched(OSError("gone"), OSError("gone"), OSError("busy"))
    assert said == [("part-restarts", "gone"), ("part-restarts", "busy")]


async def test_what_the_system_refuses_is_said_without_its_number(slept: list[float]) -> None:
    said = await watched(PermissionError(13, "Permission denied", "/run/fairlead"))
    assert said == [("part-restarts", "Permission denied: /run/fairlead")]


async def test_an_error_of_ours_is_said_with_where_it_came_from(slept: list[float]) -> None:
    said = await watched(KeyError("x"), KeyError("x"))
    assert said == [("part-failed", ""), ("part-restarts", "'x'")]


async def test_an_end_is_no_end(slept: list[float]) -> None:
    assert await watched(None, None) == [("part-restarts", "it ended, which it should not")]


async def test_of_several_failures_at_once_each_is_said(slept: list[float]) -> None:
    said = await watched(ExceptionGroup("two", [OSError("gone"), ExceptionGroup("one", [TimeoutError()])]))
    assert said[-1] == ("part-restarts", "gone; TimeoutError")


async def test_after_it_has_run_for_a_while_a_failure_is_a_new_one(
    slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0, 1.0, 2.0, 2.0, 62.0, 62.0])
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert await watched(*[OSError("gone")] * 3) == [("part-restarts", "gone")] * 2
    assert slept == [0.1, 0.2, 0.1]


async def test_cancellation_goes_through() -> None:
    started = asyncio.Event()

    async def run() -> None:
        started.set()
        await anyio.sleep_forever()

    task = asyncio.create_task(supervise("part", run))
    await started.wait()
    task.cancel()
    async with limit("it ends"):
        await asyncio.wait([task])
    assert task.cancelled()
