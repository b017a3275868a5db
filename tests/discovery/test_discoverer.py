from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agent.discovery import reading
from agent.discovery.discoverer import CALL_WELL, Discoverer, LookError
from agent.discovery.reading import Changes
from agent.runtime.workers import Workers
from backends.base import (
    ANY_SUBSYSTEM,
    Backend,
    Device,
    Discovery,
    HostPath,
    Link,
    Measure,
    PathChange,
    Problem,
    Record,
    Signal,
    Trend,
    Verdict,
    Watches,
)
from tests.fakes import KIND, Fake, device
from tests.wait import PATIENCE, block_until, limit, pass_time, settled, until

DEADLINE = 0.03
NEVER = 1e6  # seconds
HINT = PathChange(HostPath("/dev/x"))


@dataclass
class Eyes:
    """A discoverer without timers, what it published, and a way to wait for more of it."""

    backend: Fake = field(default_factory=Fake)
    news: list[Changes] = field(default_factory=list)
    kind: str = KIND
    options: dict[str, Any] = field(default_factory=dict)
    fails: bool = False
    """Whether nothing can be published."""

    def __post_init__(self) -> None:
        patient = {"resync": NEVER, "probe": NEVER, "unit_deadline": NEVER}
        self.it = Discoverer(self.kind, self.backend, self.publish, **patient | self.options)

    def publish(self, news: Changes) -> None:
        if self.fails:
            raise LookupError
        self.news.append(news)

    async def until(self, reached: Callable[[], object]) -> None:
        await until(reached, "the discoverer gets there", self._seen)

    async def look_at(self, *units: str) -> None:
        async with limit(f"a look at {units}", self._seen):
            await self.it.look_at(units)

    def _seen(self) -> object:
        return self.known(), self.sentences(), self.news[-3:]

    def known(self) -> dict[str, list[str]]:
        return {unit: [found.key for found in devices] for unit, devices in self.it.known.items()}

    def sentences(self) -> list[str]:
        return [problem.sentence for problems in self.it.problems.values() for problem in problems]


@asynccontextmanager
async def looking(eyes: Eyes) -> AsyncIterator[Eyes]:
    """Run it, past its first scan."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(eyes.it.run)
        async with limit("the first scan"):
            await eyes.it.first_scan.wait()
        yield eyes
        tasks.cancel_scope.cancel()


class Hanging:
    """Reads that hang until they are let go.

    By its clock time passes only when one begins to hang: a thread that gets no CPU for a while does not seem to. The
    event loop sees that when it looks once more: it must not take what it had looked at before for what hangs.
    """

    def __init__(self) -> None:
        self._let_go: dict[str, threading.Event] = {}
        self.entered: list[str] = []
        self._hung: list[str] = []
        self._loop_thread, self._seen = threading.current_thread(), 0

    def clock(self) -> float:
        now = len(self._hung)
        if threading.current_thread() is self._loop_thread:
            now, self._seen = self._seen, now
        return float(now)

    def here(self, name: str = "hung") -> None:
        event = self._let_go.setdefault(name, threading.Event())
        self.entered.append(name)
        if not event.is_set():
            self._hung.append(name)
            event.wait(PATIENCE)

    def unit(self, *devices: Device, name: str = "hung") -> Callable[[], Discovery]:
        self._let_go.setdefault(name, threading.Event())

        def read() -> Discovery:
            self.here(name)
            return Discovery(devices)

        return read

    def let_go(self, *names: str) -> None:
        for name in names or self._let_go:
            self._let_go[name].set()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.let_go()


def seeing(hanging: Hanging, eyes: Eyes) -> Eyes:
    """Have what hangs be given up, and nothing else; timers go by the real clock."""
    eyes.it.reads.deadline, eyes.it.reads.clock = DEADLINE, hanging.clock
    return eyes


# --- scans ---


async def test_the_first_scan_tells_all_there_is() -> None:
    backend = Fake()
    backend.hardware = {"u": (device("a", unit="u"), device("b", unit="u")), "v": ()}
    said = Signal("a", "sick", Verdict.NOW, "")
    backend.seen = lambda found: [said] if found.key == "a" else []
    async with looking(Eyes(backend)) as eyes:
        assert eyes.news == [Changes(KIND, {"u": tuple(backend.hardware["u"])}, {"u": (said,), "v": ()})]  # type: ignore[arg-type]
        assert eyes.known() == {"u": ["a", "b"], "v": []}


async def test_a_hint_has_the_units_it_affects_looked_at_and_no_others() -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),), "v": (device("v"),)}
    backend.affected = lambda hint: ["u"]
    async with looking(Eyes(backend)) as eyes:
        backend.looked.clear()
        backend.hardware["u"] = ()
        eyes.it.hint(HINT)
        await eyes.until(lambda: len(eyes.news) == 2)
        assert backend.looked == ["u"]
        assert eyes.news[1].units == {"u": ()}
        assert eyes.known() == {"u": [], "v": ["v"]}


async def test_the_second_change_of_the_number_of_devices_is_seen_as_the_first_was() -> None:
    """Intel's plugin waits for ever after it."""
    backend = Fake()
    backend.affected = lambda hint: ["u"]
    async with looking(Eyes(backend)) as eyes:
        for number in (2, 3, 1, 0, 4):
            backend.hardware["u"] = [device(f"d{n}", unit="u") for n in range(number)]
            eyes.it.hint(HINT)
            await eyes.until(lambda number=number: len(eyes.it.known.get("u", ())) == number)  # type: ignore[misc]


async def test_a_hint_that_means_nothing_starts_no_scan() -> None:
    backend = Fake()
    backend.hardware = {"u": (), "v": ()}
    backend.affected = lambda hint: iter(())
    async with looking(Eyes(backend)) as eyes:
        backend.looked.clear()
        eyes.it.hint(HINT)
        await eyes.look_at("v")
        assert backend.looked == ["v"]
        assert len(eyes.news) == 2


async def test_absence_inside_a_full_scan_means_gone() -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),), "v": (device("v"),)}
    async with looking(Eyes(backend)) as eyes:
        del backend.hardware["u"]
        eyes.it.rescan()
        await eyes.until(lambda: len(eyes.news) == 2)
        assert eyes.news[1].units == {"u": ()}
        assert eyes.news[1].signals == {"u": (), "v": ()}  # what its probes said is over too
        assert eyes.known() == {"v": ["v"]}


async def test_what_is_unchanged_is_not_told_again_but_its_health_is() -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),)}
    async with looking(Eyes(backend)) as eyes:
        eyes.it.rescan()
        await eyes.until(lambda: len(eyes.news) == 2)
        assert eyes.news[1] == Changes(KIND, {}, {"u": ()})


async def test_hints_during_a_scan_are_not_lost(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"hung": hanging.unit(device("hung")), "v": (device("v"),)}
    backend.affected = lambda hint: ["v"]
    eyes = Eyes(backend)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(eyes.it.run)
        await eyes.until(lambda: hanging.entered == ["hung"])
        eyes.it.hint(HINT)
        hanging.let_go()
        await eyes.until(lambda: len(eyes.news) == 2)
        assert backend.looked == ["hung", "v", "v"]
        tasks.cancel_scope.cancel()


async def test_a_slow_timer_looks_at_everything() -> None:
    async with looking(Eyes(options={"resync": 0.01})) as eyes:
        eyes.backend.hardware["w"] = (device("w"),)
        await eyes.until(lambda: "w" in eyes.known())


async def test_links_are_told_when_they_are_others_than_before() -> None:
    backend = Fake()
    links: list[Link] = [Link("a", "b", 4)]
    backend.hardware = {"u": lambda: Discovery((device("a", unit="u"),), tuple(links)), "v": ()}
    async with looking(Eyes(backend)) as eyes:
        for n, (now, told) in enumerate(
            [
                ([Link("a", "b", 4)], {}),
                ([Link("a", "b", 2)], {"u": (Link("a", "b", 2),)}),
                ([], {"u": ()}),
                ([], {}),
                ([Link("a", "b", 1)], {"u": (Link("a", "b", 1),)}),
            ],
            start=2,
        ):
            links[:] = now
            eyes.it.rescan()
            await eyes.until(lambda n=n: len(eyes.news) == n)  # type: ignore[misc]
            assert eyes.news[-1] == Changes(KIND, {}, {"u": (), "v": ()}, told)  # type: ignore[arg-type]
        assert eyes.news[0].links == {"u": (Link("a", "b", 4),)}
        backend.hardware = {}
        eyes.it.rescan()
        await eyes.until(lambda: len(eyes.news) == 7)
        assert eyes.news[-1] == Changes(KIND, {"u": (), "v": ()}, {"u": (), "v": ()}, {"u": ()})


# --- probes ---

SICK = Signal("u", "sick", Verdict.NOW, "")
RISING = Signal("u", "errors", Verdict.DEGRADED, "", measure=Measure("errors", 7, Trend.RISES))


def polled(backend: Fake, poll: float = 0.005) -> Eyes:
    """Eyes of a backend that asks to be probed so often."""
    backend.watched = lambda: Watches(poll=poll)
    return Eyes(backend)


def run_out(eyes: Eyes) -> None:
    """The timer of probes has run out."""
    eyes.it.schedule._probed = -1e9
    eyes.it.schedule.asked.set()


async def probes(eyes: Eyes, number: int) -> None:
    """Wait for so many more of them."""
    goal = len(eyes.backend.probed) + number
    await eyes.until(lambda: len(eyes.backend.probed) >= goal)


@pytest.mark.parametrize(("poll", "probe"), [(0.005, 60.0), (60.0, 0.005), (None, 0.005)])
async def test_a_timer_probes_what_is_known_and_looks_for_nothing(poll: float | None, probe: float) -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),), "v": ()}
    backend.watched = lambda: Watches(poll=poll)
    async with looking(Eyes(backend, options={"probe": probe})) as eyes:
        backend.hardware |= {"u": (), "w": (device("w"),)}
        backend.looked.clear()
        await probes(eyes, 3)
        assert backend.looked == []
        assert set(backend.probed) == {"u"}
        assert eyes.known() == {"u": ["u"], "v": []}


async def test_what_cannot_be_used_is_looked_at_where_others_are_probed() -> None:
    """NVIDIA's driver knows a GPU's UUID only once that has been used, and tells nobody."""
    backend = Fake()
    late = device("u")
    backend.hardware = {"u": (replace(late, unusable="it has not been used yet"),), "v": (device("v"),)}
    async with looking(Eyes(backend, options={"probe": 0.005})) as eyes:
        assert eyes.it.known["u"][0].unusable
        backend.looked.clear()
        backend.hardware |= {"u": (late,)}
        await eyes.until(lambda: eyes.it.known["u"] == (late,))
        backend.looked.clear()
        await probes(eyes, 4)
        assert backend.looked == []
        assert set(backend.probed[-4:]) == {"u", "v"}


async def test_a_probe_tells_only_what_its_unit_did_not_say_before() -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),), "v": (device("v"),)}
    async with looking(polled(backend)) as eyes:
        await probes(eyes, 4)
        assert len(eyes.news) == 1
        for n, said in enumerate(([SICK], []), start=2):
            backend.seen = lambda found, said=said: said if found.key == "u" else []  # type: ignore[misc]
            await eyes.until(lambda n=n: len(eyes.news) == n)  # type: ignore[misc]
            await probes(eyes, 4)
            assert len(eyes.news) == n
            assert eyes.news[-1] == Changes(KIND, {}, {"u": tuple(said)})


async def test_what_a_look_told_a_probe_does_not_repeat() -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),)}
    backend.seen = lambda found: [SICK]
    async with looking(polled(backend)) as eyes:
        await probes(eyes, 4)
        assert [news.signals for news in eyes.news] == [{"u": (SICK,)}]


async def test_of_a_measure_every_probe_tells() -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),), "v": (device("v"),)}
    backend.seen = lambda found: [RISING] if found.key == "u" else []
    async with looking(polled(backend)) as eyes:
        await eyes.until(lambda: len(eyes.news) >= 4)
        assert eyes.news[1:4] == [Changes(KIND, {}, {"u": (RISING,)})] * 3


async def test_between_probes_a_glance_tells_whether_one_is_due() -> None:
    class Glanced(Fake):
        shows, glances = 0, 0

        def glance(self, device: Device) -> object:
            self.glances += 1
            return self.shows

    backend = Glanced()
    backend.hardware = {"u": (device("u"),)}
    backend.seen = lambda found: [RISING]
    async with looking(polled(backend)) as eyes:
        for n, shows in enumerate((0, 1, 2), start=2):  # the first glance after a look has it probed
            backend.shows = shows
            await eyes.until(lambda n=n: len(eyes.news) == n)  # type: ignore[misc]
            goal = backend.glances + 3
            await eyes.until(lambda goal=goal: backend.glances >= goal)  # type: ignore[misc]
            assert len(eyes.news) == n
        assert eyes.news[1:] == [Changes(KIND, {}, {"u": (RISING,)})] * 3


async def test_a_unit_whose_probe_hangs_is_quarantined_and_the_others_are_probed_on(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {name: (device(name),) for name in ("a", "hung", "z")}
    async with looking(seeing(hanging, polled(backend))) as eyes:

        def seen(found: Device) -> list[Signal]:
            if found.key == "hung":
                hanging.here()
            return []

        backend.seen = seen
        await eyes.until(lambda: bool(eyes.sentences()))
        backend.probed.clear()
        await probes(eyes, 6)
        assert eyes.sentences() == [
            "reading hung has hung for more than 0.03 s; it is left alone until the read returns"
        ]
        assert set(backend.probed) == {"a", "z"}
        assert hanging.entered == ["hung"]
        hanging.let_go()
        await eyes.until(lambda: not eyes.it.problems)
        await eyes.until(lambda: len(hanging.entered) > 1)


@pytest.mark.usefixtures("quick_retries")
async def test_a_probe_that_fails_is_said_once_and_heals() -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),), "v": (device("v"),)}

    def fail(found: Device) -> list[Signal]:
        if found.key == "u":
            raise OSError("no such luck")
        return []

    with capture_logs() as logs:
        async with looking(polled(backend)) as eyes:
            backend.seen = fail
            await probes(eyes, 10)
            assert eyes.sentences() == ["u cannot be read: no such luck"]
            backend.seen = lambda found: []
            await eyes.until(lambda: not eyes.it.problems)
    assert [line["event"] for line in logs] == ["discovery-problem", "discovery-problem-solved"]


async def test_a_hint_does_not_wait_until_all_are_probed_and_the_rest_is_probed_after_it() -> None:
    backend, entered, let_go = Fake(), threading.Event(), threading.Event()
    backend.hardware = {name: (device(name),) for name in "abc"}
    backend.affected = lambda hint: ["c"]
    eyes = Eyes(backend)
    async with looking(eyes):
        done: list[str] = []

        def seen(found: Device) -> list[Signal]:
            entered.set()
            let_go.wait(PATIENCE)
            done.append(found.key)
            return []

        backend.seen = seen
        run_out(eyes)
        await eyes.until(entered.is_set)
        eyes.it.hint(HINT)
        let_go.set()
        await eyes.until(lambda: len(done) == 4)
        assert done == ["a", "c", "b", "c"]
        assert backend.looked == ["a", "b", "c", "c"]


async def test_probes_go_on_although_hints_never_end() -> None:
    backend = Fake()
    backend.hardware = {name: (device(name),) for name in "abc"}
    backend.affected = lambda hint: ["c"]
    async with looking(polled(backend)) as eyes:
        backend.probed.clear()

        def again(found: Device) -> list[Signal]:
            hinted = threading.Event()
            loop.call_soon_threadsafe(eyes.it.hint, HINT)
            loop.call_soon_threadsafe(hinted.set)
            hinted.wait(PATIENCE)  # it is there before the walk is over
            return []

        loop = asyncio.get_running_loop()
        backend.seen = again
        await eyes.until(lambda: {"a", "b"} <= set(backend.probed))
        backend.seen = lambda _device: ()


async def test_without_a_thread_probes_are_not_tried_for_ever(hanging: Hanging) -> None:
    backend = Fake()
    names = [f"hung{n}" for n in range(4)]
    backend.hardware = {"a": (device("a"),)}
    async with looking(seeing(hanging, Eyes(backend))) as eyes:
        eyes.it.workers._limit = len(names)
        backend.hardware |= {name: hanging.unit(device(name), name=name) for name in names}
        eyes.it.rescan()
        await eyes.until(lambda: len(eyes.sentences()) == 4)
        backend.probed.clear()
        run_out(eyes)
        await eyes.until(lambda: any(s.startswith("all 4 threads") for s in eyes.sentences()))
        await settled()
        assert backend.probed == []
        hanging.let_go()
        await eyes.until(lambda: len(eyes.known()) == 5)
        run_out(eyes)
        await probes(eyes, 5)


@pytest.mark.parametrize("poll", [0, -1.0, "2s", float("nan")])
async def test_a_poll_that_makes_no_sense_is_a_problem_and_none(poll: Any) -> None:
    backend = Fake()
    backend.watched = lambda: Watches(poll=poll)
    eyes = Eyes(backend)
    assert eyes.it.watches() == Watches()
    assert eyes.sentences()[0].startswith("watches() failed: ")
    assert eyes.it.schedule.poll is None


# --- those who wait for a look ---


async def test_a_look_that_was_asked_for_has_ended_and_been_published() -> None:
    backend = Fake()
    backend.hardware = {"u": (), "v": (), "w": ()}
    async with looking(Eyes(backend)) as eyes:
        backend.looked.clear()
        backend.hardware |= {"u": (device("u"),), "w": (device("w"),)}
        await eyes.look_at("u", "v")
        assert eyes.known() == {"u": ["u"], "v": [], "w": []}
        assert eyes.news[-1].units.keys() == {"u"}
        assert backend.looked == ["u", "v"]
        await eyes.look_at()
        await eyes.look_at("a unit that there never was")


async def test_a_look_that_had_begun_before_is_not_the_one_that_was_asked_for(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"u": ()}
    async with looking(Eyes(backend)) as eyes:
        backend.hardware["u"] = hanging.unit(device("old", unit="u"), name="old")
        eyes.it.rescan()
        await eyes.until(lambda: hanging.entered)
        backend.hardware["u"] = hanging.unit(device("new", unit="u"), name="new")
        asked = asyncio.ensure_future(eyes.look_at("u"))
        await asyncio.sleep(0)
        hanging.let_go("old")
        await eyes.until(lambda: hanging.entered == ["old", "new"])
        assert eyes.known() == {"u": ["old"]}
        assert not asked.done()
        hanging.let_go()
        await asked
        assert eyes.known() == {"u": ["new"]}


async def test_a_look_at_everything_is_a_look_at_what_was_asked_for() -> None:
    backend = Fake()
    backend.hardware = {"u": ()}
    async with looking(Eyes(backend)) as eyes:
        backend.hardware["u"] = (device("u"),)
        eyes.it.schedule._todo.everything = True
        await eyes.look_at("u", "gone")
        assert eyes.known() == {"u": ["u"]}


async def test_while_nothing_can_be_listed_what_was_asked_for_is_looked_at() -> None:
    backend = Fake()
    backend.hardware = {"u": ()}
    async with looking(Eyes(backend)) as eyes:
        backend.hardware["u"] = (device("u"),)
        backend.listed = failing()
        eyes.it.schedule._todo.everything = True  # together with what is asked for
        await eyes.look_at("u")
        assert eyes.known() == {"u": ["u"]}


async def test_who_waits_for_a_unit_that_hangs_is_told_at_once(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"u": (), "v": ()}
    sentence = "reading u has hung for more than 0.03 s; it is left alone until the read returns"
    async with looking(seeing(hanging, Eyes(backend))) as eyes:
        backend.hardware["u"] = hanging.unit(name="u")
        waiting = [asyncio.ensure_future(eyes.look_at(*units)) for units in ("uv", "v")]
        with pytest.raises(LookError, match=sentence):
            await waiting[0]
        await waiting[1]
        with pytest.raises(LookError, match=sentence):
            await eyes.look_at("v", "u")
        hanging.let_go()
        await eyes.until(lambda: not eyes.it.problems)
        await eyes.look_at("u")


async def test_who_waits_for_a_unit_that_cannot_be_read_is_told_why() -> None:
    backend = Fake()
    backend.hardware = {"u": (), "v": ()}
    async with looking(Eyes(backend)) as eyes:
        backend.hardware["u"] = failing()
        with pytest.raises(LookError, match="u cannot be read: no such luck"):
            await eyes.look_at("u", "v")
        await eyes.look_at("v")


async def test_who_waits_while_there_is_no_thread_is_told_so(hanging: Hanging) -> None:
    backend = Fake()
    names = [f"hung{n}" for n in range(4)]
    backend.hardware = {name: hanging.unit(name=name) for name in names} | {"z": ()}
    eyes = seeing(hanging, Eyes(backend))
    eyes.it.workers._limit = len(names)
    async with looking(eyes):
        with pytest.raises(LookError, match="all 4 threads of fake hang"):
            await eyes.look_at("z")


async def test_who_waits_may_stop_waiting(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"u": ()}
    async with looking(Eyes(backend)) as eyes:
        backend.hardware["u"] = hanging.unit(device("u"), name="u")
        waiting = asyncio.ensure_future(eyes.look_at("u"))
        await eyes.until(lambda: hanging.entered)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        hanging.let_go()
        await eyes.until(lambda: eyes.known() == {"u": ["u"]})
        assert eyes.it._waiters == []
        await eyes.look_at("u")


async def test_who_waits_goes_on_waiting_over_a_failure_of_ours() -> None:
    eyes = Eyes()
    eyes.backend.hardware = {"u": ()}
    async with anyio.create_task_group() as tasks:
        asked = asyncio.ensure_future(eyes.look_at("u"))
        await asyncio.sleep(0)
        eyes.fails = True
        with pytest.raises(LookupError):
            await eyes.it.run()
        assert not asked.done()
        eyes.fails = False
        tasks.start_soon(eyes.it.run)
        await asked
        tasks.cancel_scope.cancel()


# --- records ---

RECORD = Record("kmsg", "boot", 7, 1.0, "u is dead")


async def test_a_record_means_what_the_backend_says() -> None:
    eyes = Eyes()
    eyes.backend.recorded = lambda record: iter([SICK] if record is RECORD else [])
    assert eyes.it.signals(RECORD) == (SICK,)


@pytest.mark.parametrize("answer", [lambda record: None, lambda record: ["dead"], lambda record: failing()()])
async def test_a_backend_that_fails_on_records_says_nothing_and_is_reported_once(answer: Callable[[Any], Any]) -> None:
    eyes = Eyes()
    eyes.backend.recorded = answer
    with capture_logs() as logs:
        for n in range(3):
            assert eyes.it.signals(replace(RECORD, sequence=n)) == ()
    assert len(logs) == 1
    assert logs[0]["reason"].startswith("signals() failed on Record(")
    async with looking(eyes):
        assert len(eyes.sentences()) == 1  # a full look does not solve it


async def test_calls_that_fail_now_and_then_are_one_problem_until_none_has_failed_for_a_minute() -> None:
    eyes = Eyes()
    calls: tuple[tuple[str, Callable[[], object]], ...] = (
        ("recorded", lambda: eyes.it.signals(RECORD)),
        ("affected", lambda: eyes.it.hint(HINT)),
    )
    for name, call in calls:
        with capture_logs() as logs:
            for _ in range(5):
                setattr(eyes.backend, name, lambda _: failing()())
                call()
                setattr(eyes.backend, name, lambda _: [])
                call()
                pass_time(CALL_WELL / 2)
                await settled()
            assert [line["event"] for line in logs] == ["discovery-problem"]
            pass_time(CALL_WELL / 2)
            await settled()
            assert [line["event"] for line in logs] == ["discovery-problem", "discovery-problem-solved"]
        assert eyes.it.problems == {}


async def test_what_could_not_be_published_is_found_again_when_it_is_started_again() -> None:
    eyes = Eyes()
    eyes.backend.hardware = {"u": (device("u"),)}
    eyes.fails = True
    with pytest.raises(LookupError):
        await eyes.it.run()
    eyes.fails = False
    async with looking(eyes):
        assert eyes.news[0].units.keys() == {"u"}


# --- what hangs ---


async def test_a_unit_that_hangs_is_quarantined_the_others_go_on_and_it_comes_back(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"a": (device("a"),), "hung": hanging.unit(device("hung")), "z": (device("z"),)}
    async with looking(seeing(hanging, Eyes(backend))) as eyes:
        assert eyes.known() == {"a": ["a"], "z": ["z"]}
        assert eyes.sentences() == [
            "reading hung has hung for more than 0.03 s; it is left alone until the read returns"
        ]
        hanging.let_go()
        await eyes.until(lambda: "hung" in eyes.known())
        await eyes.until(lambda: not eyes.it.problems)


async def test_a_read_that_hangs_before_the_loop_goes_on_is_given_up(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads may be far ahead of who started it."""
    start, started = Workers.start, [0]

    def slowly(workers: Workers, call: Callable[[], None]) -> asyncio.Future[None]:
        future = start(workers, call)
        started[0] += 1
        block_until(lambda: hanging.entered or started == [1])  # the first lists the units
        return future

    monkeypatch.setattr(Workers, "start", slowly)
    backend = Fake()
    backend.hardware = {"hung": hanging.unit()}
    async with looking(seeing(hanging, Eyes(backend))) as eyes:
        assert eyes.sentences() == [
            "reading hung has hung for more than 0.03 s; it is left alone until the read returns"
        ]


async def test_a_unit_that_hangs_is_left_alone_by_every_further_scan(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"hung": hanging.unit(), "z": (device("z"),)}
    backend.affected = lambda hint: ["hung"]
    async with looking(seeing(hanging, Eyes(backend))) as eyes:
        told = len(eyes.news)
        for n in range(5):
            eyes.it.rescan()
            eyes.it.hint(HINT)
            await eyes.until(lambda n=n: len(eyes.news) > told + n)  # type: ignore[misc]
        assert hanging.entered == ["hung"]
        assert len(eyes.sentences()) == 1


async def test_what_was_known_of_a_unit_that_hangs_stays_known(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),)}
    async with looking(seeing(hanging, Eyes(backend))) as eyes:
        backend.hardware["u"] = hanging.unit(name="u")
        eyes.it.rescan()
        await eyes.until(lambda: any(news.signals.get("u") for news in eyes.news[1:]))
        (told,) = (news for news in eyes.news[1:] if news.signals)
        assert [(it.hardware, it.reason, it.verdict) for it in told.signals["u"]] == [("u", "hangs", Verdict.NOW)]
        assert eyes.known() == {"u": ["u"]}
        hanging.let_go()
        await eyes.until(lambda: eyes.known() == {"u": []})


async def test_a_read_that_returns_while_it_is_being_given_up_is_told(hanging: Hanging) -> None:
    """Its thread writes down what it found in the moment in which we make known what there is without it."""

    class Late(Eyes):
        def publish(self, news: Changes) -> None:
            if job := eyes.it.reads.lingering.get("hung"):
                hanging.let_go()
                block_until(lambda: job.done)
            super().publish(news)

    backend = Fake()
    backend.hardware = {"hung": hanging.unit(device("hung", unit="hung"))}
    eyes = seeing(hanging, Late(backend))
    async with looking(eyes):
        await eyes.until(lambda: "hung" in eyes.known())
        assert [found for news in eyes.news for found in news.units.get("hung", ())] == [device("hung")]


async def test_what_is_given_up_is_what_hung_although_the_next_read_begins_in_that_moment(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"hung": hanging.unit(), "next": hanging.unit(name="next")}
    eyes, loop_thread, gone_on = seeing(hanging, Eyes(backend)), threading.current_thread(), threading.Event()

    def clock() -> float:
        now = hanging.clock()
        if now and threading.current_thread() is loop_thread and not gone_on.is_set():
            gone_on.set()
            hanging.let_go("hung")
            block_until(lambda: hanging._hung == ["hung", "next"])
            hanging.clock()  # the next walk begins after that
        return now

    eyes.it.reads.clock = clock
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(eyes.it.run)
            await eyes.until(lambda: bool(logs))
            hanging.let_go()
            async with limit("the first scan"):
                await eyes.it.first_scan.wait()
            tasks.cancel_scope.cancel()
    assert logs[0]["subject"] == "hung"


@pytest.mark.parametrize("returns", [False, True])
async def test_a_slow_read_ends_or_is_given_up_although_hints_never_end(returns: bool, hanging: Hanging) -> None:
    backend, now = Fake(), [0.0]
    eyes = Eyes(backend)
    loop = asyncio.get_running_loop()

    def busy() -> Discovery:
        if hanging.entered:
            hinted = threading.Event()
            loop.call_soon_threadsafe(eyes.it.hint, HINT)
            loop.call_soon_threadsafe(hinted.set)
            hinted.wait(PATIENCE)  # it is there before the scan is over
            now[0] += 0.2
        return Discovery()

    def slow() -> Discovery:
        now[0] += 0.2  # longer than another unit waits for it
        hanging.here()
        return Discovery((device("slow"),))

    backend.affected = lambda _: ["busy"]
    backend.hardware = {"busy": busy, "slow": slow}
    eyes.it.reads.deadline, eyes.it.reads.clock = (NEVER if returns else 5.0), lambda: now[0]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(eyes.it.run)
        await eyes.until(lambda: bool(hanging.entered))
        eyes.it.hint(HINT)
        if returns:
            hanging.let_go()
            await eyes.until(lambda: eyes.known().get("slow") == ["slow"])
        else:
            await eyes.until(lambda: any("reading slow has hung" in sentence for sentence in eyes.sentences()))
        tasks.cancel_scope.cancel()


async def all_are_slow(eyes: Eyes, hanging: Hanging, **answers: Callable[[], Discovery]) -> list[asyncio.Future[None]]:
    """Have these units looked at until each read is left to its thread."""
    now = [0.0]

    def slowly(unit: str, answer: Callable[[], Discovery]) -> Callable[[], Discovery]:
        def read() -> Discovery:
            now[0] += 0.2  # longer than another unit waits for it
            hanging.here(unit)
            return answer()

        return read

    eyes.it.reads.clock = lambda: now[0]
    eyes.backend.hardware |= {unit: slowly(unit, answer) for unit, answer in answers.items()}
    asked: list[asyncio.Future[None]] = [asyncio.ensure_future(eyes.look_at(unit)) for unit in answers]
    await eyes.until(lambda: eyes.it.reads.slow.keys() == answers.keys())
    return asked


async def test_each_who_waits_is_told_what_became_of_a_slow_read_though_several_end_at_once(hanging: Hanging) -> None:
    eyes = Eyes()
    eyes.backend.hardware = {"a": Discovery, "b": Discovery, "c": Discovery}
    async with looking(eyes):
        found = [Discovery((device(it),)) for it in "ab"]
        asked = await all_are_slow(eyes, hanging, a=lambda: found[0], b=lambda: found[1], c=failing())
        hanging.let_go()
        block_until(lambda: all(job.done for job in eyes.it.reads.lingering.values()))
        await asked[0]
        await asked[1]
        assert eyes.known() == {"a": ["a"], "b": ["b"], "c": []}
        with pytest.raises(LookError):
            await asked[2]


async def test_what_a_slow_read_saw_of_a_unit_that_is_gone_meanwhile_is_not_told(hanging: Hanging) -> None:
    eyes, found = Eyes(), Discovery((device("u"),))
    eyes.backend.hardware = {"u": lambda: found}
    async with looking(eyes):
        (asked,) = await all_are_slow(eyes, hanging, u=lambda: found)
        eyes.backend.hardware = {}
        eyes.it.rescan()
        await eyes.until(lambda: not eyes.known())
        told = len(eyes.news)
        hanging.let_go()
        await asked
        assert eyes.known() == {}
        assert not any("u" in it.units for it in eyes.news[told:])


async def test_while_the_listing_hangs_what_is_known_is_still_looked_at(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),)}
    backend.affected = lambda hint: ["u"]
    async with looking(seeing(hanging, Eyes(backend))) as eyes:

        def listed() -> list[str]:
            hanging.here()
            return list(backend.hardware)

        backend.listed = listed
        eyes.it.rescan()
        await eyes.until(lambda: bool(eyes.sentences()))
        assert eyes.sentences() == [
            "listing its units has hung for more than 0.03 s; it is left alone until the read returns"
        ]
        for look in (eyes.it.rescan, lambda: eyes.it.hint(HINT)):
            wanted = [] if eyes.known()["u"] else ["u"]
            backend.hardware["u"] = tuple(device(key) for key in wanted)
            look()
            await eyes.until(lambda wanted=wanted: eyes.known() == {"u": wanted})  # type: ignore[misc]
        backend.hardware["v"] = ()
        hanging.let_go()
        await eyes.until(lambda: "v" in eyes.known())
        assert eyes.sentences() == []


async def test_when_every_thread_hangs_it_is_said_and_heals(hanging: Hanging) -> None:
    backend = Fake()
    names = [f"hung{n}" for n in range(4)]
    backend.hardware = {name: hanging.unit(device(name), name=name) for name in names} | {"z": (device("z"),)}
    eyes = seeing(hanging, Eyes(backend))
    eyes.it.workers._limit = 4
    async with looking(eyes) as eyes:
        assert any(s.startswith("all 4 threads of fake hang; its devices are") for s in eyes.sentences())
        assert eyes.known() == {}
        hanging.let_go("hung0")
        await eyes.until(lambda: eyes.known() == {"hung0": ["hung0"], "z": ["z"]})
        hanging.let_go()
        await eyes.until(lambda: len(eyes.known()) == 5)
        await eyes.until(lambda: not eyes.it.problems)


async def test_another_backend_sees_at_once_while_one_hangs(hanging: Hanging) -> None:
    broken, well = Fake(), Fake()
    broken.hardware = {"hung": hanging.unit()}
    well.hardware = {"u": ()}
    one, other = Eyes(broken), Eyes(well, kind="other")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.it.run)
        await one.until(lambda: bool(hanging.entered))
        async with looking(other):
            other.it.rescan()
            await other.until(lambda: len(other.news) == 2)
            assert not any(news.units for news in one.news), "it still hangs"
        tasks.cancel_scope.cancel()


async def test_cancellation_ends_at_once_although_a_read_hangs_and_nobody_misses_what_it_raises() -> None:
    entered, let_go, left = threading.Event(), threading.Event(), threading.Event()
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))

    def read() -> list[str]:
        entered.set()
        let_go.wait(PATIENCE)
        left.set()
        raise OSError("too late")

    eyes = Eyes()
    eyes.backend.listed = read
    task = asyncio.create_task(eyes.it.run())
    await eyes.until(entered.is_set)
    task.cancel()
    await asyncio.wait([task])
    assert not left.is_set()
    let_go.set()
    await eyes.until(left.is_set)
    await settled()
    del task
    assert complaints == []


# --- what raises ---


def failing(sentence: str = "no such luck") -> Callable[[], Any]:
    def fail() -> Any:
        raise OSError(sentence)

    return fail


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_RETRY_FIRST", 0.01)


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("answer", [failing(), lambda: None, lambda: Discovery(("nonsense",))])  # type: ignore[arg-type]
async def test_a_unit_that_cannot_be_read_keeps_what_was_known_and_is_tried_again(answer: Callable[[], Any]) -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),), "v": ()}
    async with looking(Eyes(backend)) as eyes:
        backend.hardware |= {"u": answer, "v": (device("v"),)}
        eyes.it.rescan()
        await eyes.until(lambda: eyes.known() == {"u": ["u"], "v": ["v"]})
        await eyes.until(lambda: len(eyes.sentences()) == 1)
        assert eyes.sentences()[0].startswith("u cannot be read: ")
        backend.hardware["u"] = ()
        await eyes.until(lambda: eyes.known() == {"u": [], "v": ["v"]})
        await eyes.until(lambda: not eyes.it.problems)


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("answer", [failing(), lambda: None, lambda: "gpu0", lambda: [7]])
async def test_a_backend_that_cannot_list_keeps_what_was_known_and_is_tried_again(answer: Callable[[], Any]) -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),)}
    whole = backend.listed
    async with looking(Eyes(backend)) as eyes:
        backend.listed = answer
        eyes.it.rescan()
        await eyes.until(lambda: len(eyes.sentences()) == 1)
        assert eyes.sentences()[0].startswith("backend fake cannot list its units: ")
        assert eyes.known() == {"u": ["u"]}
        backend.hardware = {"v": ()}
        backend.listed = whole
        await eyes.until(lambda: eyes.known() == {"v": []})
        await eyes.until(lambda: not eyes.it.problems)


async def test_a_unit_that_settles_is_looked_at_again_once_that_is_over_and_then_no_more() -> None:
    loop, backend = asyncio.get_running_loop(), Fake()
    left = [0.1, 1.9]  # the second look, for an event, comes 0.1 s before the first one's end
    backend.hardware = {"u": lambda: Discovery(settles=left.pop() if left else 0.0), "v": ()}
    backend.affected = lambda _hint: ["u"]
    async with looking(Eyes(backend, options={"clock": lambda: loop.time()})) as eyes:
        eyes.it.hint(HINT)
        await eyes.until(lambda: not left)
        pass_time(2.0)
        await eyes.until(lambda: len(backend.looked) == 4)
        pass_time(1000.0)
        await eyes.look_at("v")
        assert backend.looked == ["u", "v", "u", "u", "v"]


async def test_a_first_scan_that_fails_is_a_first_scan() -> None:
    eyes = Eyes()
    eyes.backend.listed = failing()
    async with looking(eyes):
        assert eyes.known() == {}


async def test_problems_are_logged_once_and_their_end_too() -> None:
    backend = Fake()
    said: list[Problem] = [Problem("a", "A is odd.")]
    backend.hardware = {"u": lambda: Discovery(problems=tuple(said))}
    with capture_logs() as logs:
        async with looking(Eyes(backend)) as eyes:
            for answer in (said[:], [*said, Problem("b", "B is odd.")], []):
                said[:] = answer
                told = len(eyes.news)
                eyes.it.rescan()
                await eyes.until(lambda told=told: len(eyes.news) > told)  # type: ignore[misc]
    assert [(line["event"], line.get("reason")) for line in logs] == [
        ("discovery-problem", "A is odd."),
        ("discovery-problem", "B is odd."),
        ("discovery-problem-solved", None),
    ]


async def test_the_problems_of_a_unit_that_is_gone_are_gone() -> None:
    backend = Fake()
    backend.hardware = {"u": failing()}
    async with looking(Eyes(backend)) as eyes:
        assert len(eyes.sentences()) == 1
        backend.hardware = {}
        eyes.it.rescan()
        await eyes.until(lambda: not eyes.it.problems and not eyes.it.schedule.retries)


def lazily() -> Iterator[str]:
    yield "u"
    raise OSError("too late")


@pytest.mark.parametrize("answer", [failing(), lazily, lambda: None, lambda: "unit", lambda: [""]])
async def test_a_hint_that_a_backend_cannot_take_has_everything_looked_at_and_is_said_once(
    answer: Callable[[], Any],
) -> None:
    backend = Fake()
    backend.affected = lambda hint: answer()
    with capture_logs() as logs:
        async with looking(Eyes(backend)) as eyes:
            backend.hardware = {"u": ()}
            for n in range(3):
                eyes.it.hint(PathChange(HostPath(f"/dev/x{n}")))
            await eyes.until(lambda: eyes.known() == {"u": []})
    assert [line["event"] for line in logs] == ["discovery-problem"]
    assert logs[0]["reason"].startswith("affects() failed on PathChange(")


# --- what it listens to ---


async def test_what_to_listen_to_is_asked_again_when_something_new_is_known() -> None:
    wanted: list[Watches] = []
    eyes: Eyes
    eyes = Eyes(options={"on_watches": lambda: wanted.append(eyes.it.watched)})
    eyes.backend.watched = lambda: Watches(subsystems=frozenset({"drm"}))
    async with looking(eyes):
        assert wanted == []
        eyes.backend.hardware = {"u": ()}
        eyes.it.rescan()
        await eyes.until(lambda: bool(wanted))
        eyes.it.rescan()
        await eyes.until(lambda: len(eyes.news) == 3)
        assert wanted == [Watches(subsystems=frozenset({"drm"}))]


@pytest.mark.parametrize("answer", [failing(), lambda: None])
async def test_watches_that_fail_are_none_and_said_until_they_do_not(answer: Callable[[], Any]) -> None:
    eyes = Eyes()
    eyes.backend.watched = answer
    assert eyes.it.watches() == Watches()
    assert eyes.sentences()[0].startswith("watches() failed: ")
    eyes.backend.watched = Watches
    assert eyes.it.watches() == Watches()
    assert eyes.sentences() == []


async def test_watches_that_fail_are_asked_for_again_soon_and_no_more_once_they_do_not() -> None:
    clock = iter(range(0, 10**9, 100))  # seconds: whatever is due once is due at the next look
    eyes, listed = Eyes(options={"clock": lambda: float(next(clock))}), [0]

    def units() -> list[str]:
        listed[0] += 1
        return []

    eyes.backend.listed, eyes.backend.watched = units, failing()
    eyes.it.watches()
    async with looking(eyes):
        await eyes.until(lambda: listed[0] > 2)
        eyes.backend.watched = Watches
        await eyes.until(lambda: not eyes.sentences())
    assert eyes.it.schedule.retries == {}


async def test_every_event_is_refused_to_a_backend_that_does_not_say_what_each_is_about() -> None:
    eyes = Eyes()
    eyes.backend.watched = lambda: Watches(frozenset({ANY_SUBSYSTEM}))
    assert eyes.it.watches() == Watches(frozenset({ANY_SUBSYSTEM}))

    class Forgetful(Fake):
        affects = Backend.affects

    watched, eyes = eyes.backend.watched, Eyes()
    eyes.it.backend = Forgetful()
    eyes.it.backend.watched = watched
    assert eyes.it.watches() == Watches()
    assert "affects() does not say what each is about" in eyes.sentences()[0]


async def test_what_to_listen_to_is_asked_again_when_a_unit_without_devices_is_gone() -> None:
    """A backend may watch the directory of each unit."""
    eyes = Eyes()
    eyes.backend.hardware = {"u": ()}
    eyes.backend.watched = lambda: Watches(directories=frozenset({HostPath(f"/dev/{unit}") for unit in eyes.known()}))
    async with looking(eyes):
        await eyes.until(lambda: eyes.it.watched.directories == {HostPath("/dev/u")})
        eyes.backend.hardware = {}
        eyes.it.rescan()
        await eyes.until(lambda: eyes.it.watched == Watches())
