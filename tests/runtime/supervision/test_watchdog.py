from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import anyio
import pytest
from structlog.testing import capture_logs

from agent.discovery.kmsg import KmsgSource
from agent.discovery.paths import Change, DirectoryWatch, PathSource
from agent.discovery.sources import Emitted
from agent.discovery.uevents import LinkSource, UeventSource
from agent.runtime import watchdog
from agent.runtime.watchdog import BEAT, FAILING, RECOVERED, SILENCE, Notifier, Pulse, Watchdog, beating, supervise
from backends.base import Host, HostPath
from tests.wait import until


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Fed(Notifier, frozen=True):
    """Counts what systemd's watchdog is fed."""

    times: ClassVar[int] = 0

    def feed(self) -> None:
        Fed.times += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def dog(clock: Clock) -> Watchdog:
    Fed.times = 0
    return Watchdog(Fed(None, 30.0), clock)


def turn(dog: Watchdog, clock: Clock, seconds: float) -> None:
    """Let time pass in which the event loop turns."""
    for _ in range(round(seconds)):
        clock.now += 1
        dog._turn()


def events(dog: Watchdog) -> list[tuple[str, str]]:
    with capture_logs() as logs:
        dog.look()
    return [(line["event"], line.get("reason", "")) for line in logs]


# --- signs of life ---


def test_it_is_fed_as_long_as_every_part_shows_signs_of_life(dog: Watchdog, clock: Clock) -> None:
    pulses = [dog.pulse("uevents"), dog.pulse("inotify")]
    for _ in range(10):
        clock.now += SILENCE
        for pulse in pulses:
            pulse.beat()
        assert events(dog) == []
    assert (Fed.times, dog.alive()) == (10, "")


def test_a_part_that_is_silent_is_named_once_and_fed_again_when_it_is_back(dog: Watchdog, clock: Clock) -> None:
    dog.pulse("uevents")
    inotify = dog.pulse("inotify")
    dog.look()
    turn(dog, clock, SILENCE + 1)
    inotify.beat()
    silent = "uevents has shown no sign of life for 31 s"
    assert events(dog) == [("not-alive", silent)]
    assert dog.alive() == silent
    clock.now += 5
    assert events(dog) == []
    assert Fed.times == 1
    for pulse in dog._pulses:
        pulse.beat()
    assert events(dog) == [("alive-again", "")]
    assert (Fed.times, dog.alive()) == (2, "")


def test_a_part_that_never_began_is_silent_too(dog: Watchdog, clock: Clock) -> None:
    dog.pulse("uevents")
    clock.now += SILENCE + 1
    assert "uevents" in dog.alive()


@pytest.mark.parametrize(("asked", "threat"), [(30.0, "systemd restarts the service 30 s"), (None, "/healthz")])
def test_it_is_said_what_follows(clock: Clock, asked: float | None, threat: str) -> None:
    dog = Watchdog(Notifier(None, asked), clock)
    dog.pulse("uevents")
    turn(dog, clock, SILENCE + 1)
    with capture_logs() as logs:
        dog.look()
    assert logs[0]["then"].startswith(threat)


def test_a_loop_that_does_not_turn_is_seen_from_another_thread(dog: Watchdog, clock: Clock) -> None:
    dog.look()
    clock.now += SILENCE + 11
    assert dog.alive() == "the event loop has not turned for 41 s"


async def test_it_is_fed_three_times_in_its_period(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(watchdog, "anyio", SimpleNamespace(sleep=sleep))
    Fed.times = 0
    with pytest.raises(asyncio.CancelledError):
        await Watchdog(Fed(None, 30.0)).run()
    assert (slept, Fed.times) == ([10.0] * 3, 3)


async def test_how_late_the_loop_turns_is_told_at_each_look(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[float] = []
    blocked = iter((0.0, 2.5, -0.1))

    async def sleep(seconds: float) -> None:
        clock.now += seconds + next(blocked)
        if len(late) == 2:
            raise asyncio.CancelledError

    monkeypatch.setattr(watchdog, "anyio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        await Watchdog(Fed(None, 30.0), clock, lateness=late.append).run()
    assert late == [0.0, 2.5]


# --- parts that are started again ---


def test_a_part_that_waits_for_its_next_start_is_no_dead_one(clock: Clock) -> None:
    pulse = Pulse("uevents", clock)
    pulse.failed(30.0, ours=False)
    clock.now += SILENCE + 30.0
    assert pulse.problem() == ""
    clock.now += 1
    assert pulse.problem() == "uevents has shown no sign of life for 61 s"


def fail_for(pulse: Pulse, clock: Clock, seconds: float, *, ours: bool) -> None:
    for _ in range(int(seconds / 30.0)):
        pulse.failed(30.0, ours=ours)
        clock.now += 30.0
    pulse.failed(30.0, ours=ours)


def test_what_the_system_refuses_it_would_refuse_to_a_fresh_process_too(clock: Clock) -> None:
    pulse = Pulse("uevents", clock)
    fail_for(pulse, clock, 10 * FAILING, ours=False)
    assert pulse.problem() == ""


def test_a_part_that_fails_again_and_again_with_errors_of_ours_is_dead_after_a_while(clock: Clock) -> None:
    pulse = Pulse("uevents", clock)
    fail_for(pulse, clock, FAILING - 30, ours=True)
    assert pulse.problem() == ""
    clock.now += 30
    pulse.failed(30.0, ours=True)
    assert pulse.problem() == "uevents has failed again and again for 300 s"


def test_a_part_that_has_run_for_a_while_is_well_and_its_next_failure_the_first(clock: Clock) -> None:
    pulse = Pulse("uevents", clock)
    fail_for(pulse, clock, FAILING, ours=True)
    clock.now += RECOVERED
    pulse.beat()
    assert pulse.problem() == ""
    pulse.failed(30.0, ours=True)
    assert pulse.problem() == ""


async def test_who_starts_parts_again_tells_the_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, bool]] = []

    class Told(Pulse):
        def failed(self, delay: float, *, ours: bool) -> None:
            told.append((delay, ours))

    async def sleep(_: float) -> None:
        pass

    async def run() -> None:
        if len(told) == 3:
            raise SystemExit
        raise [OSError("gone"), ExceptionGroup("both", [OSError("gone")]), KeyError("x")][len(told)]

    monkeypatch.setattr(watchdog, "anyio", SimpleNamespace(sleep=sleep))
    with pytest.raises(SystemExit):
        await supervise("part", run, Told("part"))
    assert told == [(0.1, False), (0.2, False), (0.4, True)]


# --- the sources ---


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "BEAT", 0.001)


class Beats:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> None:
        self.number += 1

    async def come(self) -> None:
        goal = self.number + 3
        await until(lambda: self.number >= goal)


Run = Callable[[], Coroutine[Any, Any, None]]


def nothing(_: Emitted) -> None:
    pass


def uevents(_: Path, beats: Beats) -> Run:
    return UeventSource(nothing, Host(), beat=beats).run


def links(_: Path, beats: Beats) -> Run:
    source = LinkSource(nothing, beat=beats)
    source.watch(True)
    return source.run


def unwanted_links(_: Path, beats: Beats) -> Run:
    return LinkSource(nothing, beat=beats).run


def kernel_log(root: Path, beats: Beats) -> Run:
    (root / "dev").mkdir()
    os.mkfifo(root / "dev/kmsg")
    source = KmsgSource(nothing, Host.below(root), beat=beats)
    source.watch(frozenset({"Xid"}))

    async def run() -> None:
        held = os.open(root / "dev/kmsg", os.O_RDWR)  # a FIFO without a writer has an end
        try:
            await source.run()
        finally:
            os.close(held)

    return run


def unwanted_kernel_log(root: Path, beats: Beats) -> Run:
    return KmsgSource(nothing, Host.below(root), beat=beats).run


def paths(root: Path, beats: Beats) -> Run:
    source = PathSource(nothing, Host.below(root), beats)
    source.watch(frozenset({HostPath("/dev")}))
    return source.run


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "source",
    [
        uevents,
        links,
        unwanted_links,
        kernel_log,
        unwanted_kernel_log,
        paths,
    ],
)
async def test_every_source_shows_signs_of_life_while_nothing_happens(
    source: Callable[[Path, Beats], Run], tmp_path: Path
) -> None:
    beats = Beats()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source(tmp_path, beats))
        await beats.come()
        tasks.cancel_scope.cancel()


@pytest.mark.usefixtures("quick")
async def test_signs_of_life_cost_no_change_of_a_directory(tmp_path: Path) -> None:
    seen: list[str] = []
    beats = Beats()
    watch = DirectoryWatch(lambda path, change: seen.append(f"{change.value} {path.name}"), lambda: None, beats)
    watch.watch(frozenset({tmp_path}))
    async with anyio.create_task_group() as tasks:
        await tasks.start(watch.run)
        for name in "ab":
            await beats.come()
            (tmp_path / name).mkdir()
            await until(lambda name=name: f"{Change.CREATED.value} {name}" in seen)  # type: ignore[misc]
        tasks.cancel_scope.cancel()


@pytest.mark.usefixtures("quick")
async def test_what_was_waited_for_is_handed_on() -> None:
    beats, ready = Beats(), asyncio.Event()

    async def wait() -> str:
        await ready.wait()
        return "here"

    waiting = asyncio.create_task(beating(wait, beats))
    await beats.come()
    ready.set()
    assert await waiting == "here"


def test_a_part_that_beats_is_never_taken_for_silent() -> None:
    assert 2 * BEAT < SILENCE
