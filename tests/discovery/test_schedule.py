from __future__ import annotations

import asyncio

import pytest

from agent.discovery import reading
from agent.discovery.reading import EVERY_UNIT, Schedule, Todo
from backends.base import ALL
from tests.wait import limit, pass_time, settled


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def it(clock: Clock) -> Schedule:
    return Schedule(300.0, 30.0, clock)


async def due(it: Schedule, *known: str) -> Todo | None:
    """What is to be done now, if anything is."""
    return await it.next(known) if it._due_in(known) <= 0 else None


async def test_nothing_is_due_before_its_time_and_everything_at_the_start(it: Schedule, clock: Clock) -> None:
    assert await due(it, "u") is None
    it.restart()
    assert await due(it, "u") == Todo(everything=True)
    assert await due(it, "u") is None
    assert it._due_in(["u"]) == 30.0


async def test_each_timer_comes_again(it: Schedule, clock: Clock) -> None:
    begun, done = clock.now, []
    while clock.now < begun + 620:
        clock.now += 10
        while (todo := await due(it, "u")) is not None:
            done.append((clock.now - begun, todo))
    assert [at for at, todo in done if todo.everything] == [300, 600]
    assert [at for at, todo in done if todo.probes] == list(range(30, 621, 30))


async def test_what_we_could_not_look_at_for_want_of_something_is_tried_each_second(it: Schedule, clock: Clock) -> None:
    """The shortage may be over the next moment, and no event tells of it."""
    begun, tried = clock.now, []
    it.retry("u", steady=True)
    while clock.now < begun + 10:
        clock.now += 0.5
        if (todo := await due(it, "u")) is not None:
            assert todo.units == {"u"}
            tried.append(clock.now - begun)
            it.retry("u", steady=True)
    assert tried == [float(second) for second in range(1, 11)]


async def test_a_backend_that_asks_for_glances_gets_them_between_probes(it: Schedule, clock: Clock) -> None:
    begun = clock.now
    it.poll = 10.0
    assert it._due_in(["u", "v"]) == 10.0
    done = []
    for clock.now in (begun + 10, begun + 20, begun + 30, begun + 39, begun + 40):
        done.append(await due(it, "u", "v"))
    glances, probes = Todo(probes={"u", "v"}, at_a_glance=True), Todo(probes={"u", "v"})
    assert done == [glances, glances, probes, None, glances]
    it.poll = 60.0
    assert it._due_in(["u"]) == 20.0
    it.poll = None
    assert it._due_in(["u"]) == 20.0


async def test_probes_wait_until_there_is_nothing_else_to_do(it: Schedule, clock: Clock) -> None:
    clock.now += 30.0
    it.ask(["u"])
    assert await due(it, "u", "v") == Todo(units={"u"})
    assert it.asked.is_set()
    assert await due(it, "u", "v") == Todo(probes={"u", "v"})
    assert not it.asked.is_set()
    it.put_off({"v"}, at_a_glance=True)
    it.ask(ALL)
    assert await due(it, "u", "v") == Todo(everything=True)
    assert await due(it, "u", "v") == Todo(probes={"v"}, at_a_glance=True)


async def test_probes_get_their_turn_where_looks_never_end(it: Schedule, clock: Clock) -> None:
    it.put_off({"u", "v"}, at_a_glance=False)
    it.ask(["x"])
    assert await due(it) == Todo(units={"x"})
    it.ask(["x"])
    assert await due(it) == Todo(probes={"u", "v"})
    assert it.asked.is_set(), "these probes end with the first unit"
    it.put_off({"v"}, at_a_glance=False)
    assert await due(it) == Todo(units={"x"})
    it.ask(ALL)
    assert await due(it) == Todo(probes={"v"})
    assert await due(it) == Todo(everything=True)


async def test_what_is_left_of_the_last_probes_is_probed_before_the_next_begin(it: Schedule, clock: Clock) -> None:
    it.poll = 10.0
    it.put_off({"v"}, at_a_glance=False)
    clock.now += 40.0
    assert await due(it, "u", "v", "w") == Todo(probes={"v"})
    assert await due(it, "u", "v", "w") == Todo(probes={"u", "v", "w"})


async def test_what_is_left_of_a_glance_is_part_of_the_probe_that_is_due(it: Schedule, clock: Clock) -> None:
    it.poll = 10.0
    it.put_off({"v"}, at_a_glance=True)
    clock.now += 10.0
    assert await due(it, "u", "v") == Todo(probes={"v"}, at_a_glance=True)
    it.put_off({"v"}, at_a_glance=True)
    clock.now += 20.0
    assert await due(it, "u", "v") == Todo(probes={"u", "v"})


async def test_who_waits_is_woken_by_what_is_asked(it: Schedule) -> None:
    waiting = asyncio.ensure_future(it.next(["u"]))
    await asyncio.sleep(0)
    it.ask(())  # of nothing
    await settled()
    assert not waiting.done()
    it.ask(["u"])
    async with limit("what was asked"):
        assert await waiting == Todo(units={"u"})


async def test_a_timer_wakes_who_waits(it: Schedule, clock: Clock) -> None:
    waiting = asyncio.ensure_future(it.next(["u"]))
    for seconds in (10.0, 20.0):
        await settled()
        assert not waiting.done()
        clock.now += seconds
        pass_time(seconds)
    async with limit("the timer"):
        assert await waiting == Todo(probes={"u"})


async def test_a_unit_is_tried_again_later_and_later(
    it: Schedule, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_RETRY_MOST", 4.0)
    begun, tries = clock.now, []
    it.retry("u")
    while clock.now < begun + 20:
        if await due(it) is not None:
            tries.append(clock.now - begun)
            it.retry("u")
        clock.now += 1
    assert tries == [1, 3, 7, 11, 15, 19]
    it.is_well("u")
    it.retry(EVERY_UNIT)
    clock.now += 1
    assert await due(it) == Todo(everything=True)
