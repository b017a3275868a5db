"""Time in which the process did not run is held against no part of it."""

from __future__ import annotations

import asyncio

from agent.runtime.watchdog import BEAT, FAILING, RECOVERED, SILENCE, Notifier, Watchdog

STOPPED = 10 * SILENCE


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def looks(watchdog: Watchdog, clock: Clock, seconds: float) -> None:
    """Let time pass in which the event loop turns."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += BEAT
        watchdog.look()


def test_a_part_is_not_silent_because_the_process_was_stopped_and_is_if_it_stays_so() -> None:
    clock = Clock()
    watchdog = Watchdog(Notifier(None), clock)
    pulse = watchdog.pulse("part")
    pulse.beat()
    clock.now += STOPPED
    watchdog.look()
    assert not watchdog.alive()
    pulse.beat()
    looks(watchdog, clock, BEAT)
    assert not watchdog.alive()
    looks(watchdog, clock, SILENCE)
    assert "part has shown no sign of life" in watchdog.alive()


def test_a_part_does_not_fail_for_longer_because_the_process_was_stopped() -> None:
    clock = Clock()
    watchdog = Watchdog(Notifier(None), clock)
    pulse = watchdog.pulse("part")
    pulse.failed(0.0, ours=True)
    clock.now += FAILING + RECOVERED
    watchdog.look()
    pulse.failed(0.0, ours=True)
    assert not watchdog.alive()


async def test_who_asks_before_the_look_that_is_due_is_told_the_same() -> None:
    clock = Clock()
    watchdog = Watchdog(Notifier(None), clock)
    watchdog.pulse("part")
    running = asyncio.create_task(watchdog.run())
    await asyncio.sleep(0)
    clock.now += STOPPED
    assert not watchdog.alive()
    running.cancel()


async def test_another_thread_is_told_that_the_event_loop_does_not_turn() -> None:
    clock = Clock()
    watchdog = Watchdog(Notifier(None), clock)
    running = asyncio.create_task(watchdog.run())
    await asyncio.sleep(0)
    clock.now += STOPPED
    assert "has not turned" in await asyncio.to_thread(watchdog.alive)
    running.cancel()
