"""Lines of the log become events, and who watches hears of them."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest

from agent.console.views import Event
from agent.daemon.event_log import Events
from tests.wait import limit, until


async def noted(line: dict[str, Any]) -> Event:
    events = Events(wall=lambda: 7.0)
    events.note(line)
    return await anext(events.watch(1, follow=False))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            {"event": "device-changed", "resource": "a.b/c", "device": "d", "state": "Unhealthy", "reason": "hot",
             "message": "It burns.", "count": 3},
            Event(1, 7.0, "device-changed", "a.b/c", "d", "Unhealthy", "hot", "It burns."),
        ),
        (
            {"event": "allocation-refused", "resource": "a.b/c", "ids": ["d", "e"], "reason": "It burns."},
            Event(1, 7.0, "allocation-refused", "a.b/c", "d, e", message="It burns."),
        ),
        (
            {"event": "device-changed", "resource": "a.b/c", "device": "d", "state": "Healthy", "reason": "",
             "message": "", "count": 3},
            Event(1, 7.0, "device-changed", "a.b/c", "d", "Healthy"),
        ),
        ({"event": "allocated", "resource": "a.b/c", "ids": ["d"]}, Event(1, 7.0, "allocated", "a.b/c", "d")),
        (
            {"event": "resource-listed", "resource": "a.b/c", "count": 3, "healthy": 2},
            Event(1, 7.0, "resource-listed", "a.b/c", message="count 3, healthy 2"),
        ),
        (
            {"event": "discovery-problem", "backend": "gpu", "subject": "0000:3b:00.0", "reason": "It hangs."},
            Event(1, 7.0, "discovery-problem", message="It hangs."),
        ),
        (
            {"event": "part-restarts", "part": "health", "reason": "boom"},
            Event(1, 7.0, "part-restarts", message="part health: boom"),
        ),
        (
            {"event": "drained", "device": "pci:1", "hardware": ["pci:1"], "reason": "new fan"},
            Event(1, 7.0, "drained", device="pci:1", message="new fan"),
        ),
        (
            {"event": "claims-ended", "slots": [f"a.b/c/{n}" for n in range(12)]},
            Event(1, 7.0, "claims-ended",
                  message="slots " + ", ".join(f"a.b/c/{n}" for n in range(10)) + " and 2 more"),
        ),
        (
            {"event": "backend-failed", "call": "edits", "exc_info": ValueError()},
            Event(1, 7.0, "backend-failed", message="call edits"),
        ),
    ],
    ids=lambda it: it["event"] if isinstance(it, dict) else "",
)  # fmt: skip
async def test_a_line_is_an_event(line: dict[str, Any], expected: Event) -> None:
    assert await noted(line) == expected


async def test_what_libraries_log_is_no_event() -> None:
    events = Events()
    events.note({"event": "Unhandled exception", "logger": "asyncio"})
    assert await seen(events, 1) == []


async def seen(events: Events, last: int) -> list[int]:
    return [event.number async for event in events.watch(last, follow=False)]


async def test_the_newest_are_told_and_the_oldest_forgotten() -> None:
    events = Events(kept=3)
    for _ in range(5):
        events.note({"event": "x"})
    assert await seen(events, 2) == [4, 5]
    assert await seen(events, 100) == [3, 4, 5]
    assert await seen(events, 0) == []


def note_two(events: Events) -> None:
    for _ in range(2):
        events.note({"event": "x"})


async def test_who_follows_hears_of_each_also_from_other_threads() -> None:
    events = Events()
    heard: list[int] = []

    async def follow() -> None:
        async with aclosing(events.watch(0, follow=True)) as watched:
            async for event in watched:
                heard.append(event.number)
                if len(heard) == 4:
                    return

    async with limit("all four are heard", lambda: heard):
        watching = asyncio.create_task(follow())
        await asyncio.sleep(0)
        events.note({"event": "x"})
        events.note({"event": "x"})
        await until(lambda: len(heard) == 2)
        thread = threading.Thread(target=note_two, args=(events,))
        thread.start()
        await watching
        thread.join()
    assert heard == [1, 2, 3, 4]


async def test_who_does_not_keep_up_misses_the_oldest() -> None:
    events = Events(kept=3)
    events.note({"event": "x"})
    async with aclosing(events.watch(1, follow=True)) as watched:
        assert (await anext(watched)).number == 1
        for _ in range(10):
            events.note({"event": "x"})
        assert [(await anext(watched)).number for _ in range(3)] == [9, 10, 11]


def test_a_thread_may_log_while_the_loop_closes() -> None:
    events, loop = Events(), asyncio.new_event_loop()
    watching = loop.create_task(anext(events.watch(0, follow=True)))
    loop.run_until_complete(asyncio.sleep(0))

    def closed(*_: Any) -> Any:
        """It is closed between a look at it and this."""
        raise RuntimeError("Event loop is closed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_soon_threadsafe", closed)
        events.note({"event": "x"})
    assert loop.run_until_complete(seen(events, 1)) == [1]
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(watching)
    loop.close()


async def test_nothing_is_left_of_who_has_gone() -> None:
    events = Events()
    watching = asyncio.create_task(anext(events.watch(0, follow=True)))
    await asyncio.sleep(0)
    assert len(events._waiting) == 1
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert not events._waiting
