from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from agent.devices import discovery
from agent.devices.discovery import Discoverer, News
from backends.base import (
    ANY_SUBSYSTEM,
    Backend,
    Device,
    Discovery,
    HostPath,
    PathChange,
    Problem,
    Signal,
    Verdict,
    Watches,
)
from tests.devices.fakes import KIND, Fake, device

DEADLINE = 0.03
HINT = PathChange(HostPath("/dev/x"))


@dataclass
class Eyes:
    """A discoverer, what it published, and a way to wait for more of it."""

    backend: Fake = field(default_factory=Fake)
    news: list[News] = field(default_factory=list)
    kind: str = KIND
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._published = asyncio.Event()
        self.it = Discoverer(self.kind, self.backend, self.publish, **{"unit_deadline": 5.0, **self.options})

    def publish(self, news: News) -> None:
        self.news.append(news)
        self._published.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not reached():
                self._published.clear()
                if not reached():
                    await self._published.wait()

    async def until_noted(self, reached: Callable[[], bool]) -> None:
        """Wait for what is told by no news."""
        async with asyncio.timeout(5):
            while not reached():
                await asyncio.sleep(0.002)

    def known(self) -> dict[str, list[str]]:
        return {unit: [found.key for found in devices] for unit, devices in self.it.known.items()}

    def sentences(self) -> list[str]:
        return [problem.sentence for problems in self.it.problems.values() for problem in problems]


@asynccontextmanager
async def looking(eyes: Eyes) -> AsyncIterator[Eyes]:
    """Run it, past its first scan."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(eyes.it.run)
        async with asyncio.timeout(5):
            await eyes.it.first_scan.wait()
        yield eyes
        tasks.cancel_scope.cancel()


class Hanging:
    """Units whose reads hang until they are let go."""

    def __init__(self) -> None:
        self._let_go: dict[str, threading.Event] = {}
        self.entered: list[str] = []

    def unit(self, *devices: Device, name: str = "hung") -> Callable[[], Discovery]:
        event = self._let_go.setdefault(name, threading.Event())

        def read() -> Discovery:
            self.entered.append(name)
            event.wait(10)
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


# --- scans ---


async def test_the_first_scan_tells_all_there_is() -> None:
    backend = Fake()
    backend.hardware = {"u": (device("a", unit="u"), device("b", unit="u")), "v": ()}
    said = Signal("a", "sick", Verdict.NOW, "")
    backend.seen = lambda found: [said] if found.key == "a" else []
    async with looking(Eyes(backend)) as eyes:
        assert eyes.news == [News(KIND, {"u": tuple(backend.hardware["u"])}, {"u": (said,), "v": ()})]  # type: ignore[arg-type]
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


async def test_a_hint_that_means_nothing_starts_no_scan() -> None:
    backend = Fake()
    backend.affected = lambda hint: iter(())
    async with looking(Eyes(backend)) as eyes:
        eyes.it.hint(HINT)
        await asyncio.sleep(0.01)
        assert len(eyes.news) == 1


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
        assert eyes.news[1] == News(KIND, {}, {"u": ()})


async def test_hints_during_a_scan_are_not_lost(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"hung": hanging.unit(device("hung")), "v": (device("v"),)}
    backend.affected = lambda hint: ["v"]
    eyes = Eyes(backend)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(eyes.it.run)
        await eyes.until_noted(lambda: hanging.entered == ["hung"])
        eyes.it.hint(HINT)
        hanging.let_go()
        await eyes.until(lambda: len(eyes.news) == 2)
        assert backend.looked == ["hung", "v", "v"]
        tasks.cancel_scope.cancel()


async def test_timers_look_at_everything_and_at_health() -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),)}
    async with looking(Eyes(backend, options={"probe": 0.01, "resync": 60.0})) as eyes:
        backend.hardware["v"] = (device("v"),)
        await eyes.until(lambda: len(eyes.news) == 3)
        assert eyes.known() == {"u": ["u"]}
    async with looking(Eyes(backend, options={"probe": 60.0, "resync": 0.01})) as eyes:
        backend.hardware["w"] = (device("w"),)
        await eyes.until(lambda: "w" in eyes.known())


async def test_what_could_not_be_published_is_found_again_when_it_is_started_again() -> None:
    eyes = Eyes()
    eyes.backend.hardware = {"u": (device("u"),)}

    def fail(news: News) -> None:
        raise LookupError

    eyes.it._publish = fail
    with pytest.raises(LookupError):
        await eyes.it.run()
    eyes.it._publish = eyes.publish
    async with looking(eyes):
        assert eyes.news[0].units.keys() == {"u"}


# --- what hangs ---


async def test_a_unit_that_hangs_is_quarantined_the_others_go_on_and_it_comes_back(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"a": (device("a"),), "hung": hanging.unit(device("hung")), "z": (device("z"),)}
    async with looking(Eyes(backend, options={"unit_deadline": DEADLINE})) as eyes:
        assert eyes.known() == {"a": ["a"], "z": ["z"]}
        assert eyes.sentences() == ["reading hung has hung for 0.03 s; it is left alone until the read returns"]
        hanging.let_go()
        await eyes.until(lambda: "hung" in eyes.known())
        await eyes.until_noted(lambda: not eyes.it.problems)


async def test_a_unit_that_hangs_is_left_alone_by_every_further_scan(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"hung": hanging.unit(), "z": (device("z"),)}
    backend.affected = lambda hint: ["hung"]
    async with looking(Eyes(backend, options={"unit_deadline": DEADLINE})) as eyes:
        told = len(eyes.news)
        for n in range(5):  # more than there are threads
            eyes.it.rescan()
            eyes.it.hint(HINT)
            await eyes.until(lambda n=n: len(eyes.news) > told + n)  # type: ignore[misc]
        assert hanging.entered == ["hung"]
        assert len(eyes.sentences()) == 1


async def test_what_was_known_of_a_unit_that_hangs_stays_known(hanging: Hanging) -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),)}
    async with looking(Eyes(backend, options={"unit_deadline": DEADLINE})) as eyes:
        backend.hardware["u"] = hanging.unit(name="u")
        eyes.it.rescan()
        await eyes.until(lambda: len(eyes.news) == 2)
        assert eyes.news[1] == News(KIND, {}, {})
        assert eyes.known() == {"u": ["u"]}
        hanging.let_go()
        await eyes.until(lambda: eyes.known() == {"u": []})


async def test_while_the_listing_hangs_what_is_known_is_still_looked_at() -> None:
    backend, listing = Fake(), threading.Event()
    backend.hardware = {"u": (device("u"),)}
    backend.affected = lambda hint: ["u"]
    async with looking(Eyes(backend, options={"unit_deadline": DEADLINE})) as eyes:
        backend.listed = lambda: listing.wait(10) and list(backend.hardware)
        eyes.it.rescan()
        await eyes.until_noted(lambda: bool(eyes.sentences()))
        assert eyes.sentences() == ["listing its units has hung for 0.03 s; it is left alone until the read returns"]
        for look in (eyes.it.rescan, lambda: eyes.it.hint(HINT)):
            wanted = [] if eyes.known()["u"] else ["u"]
            backend.hardware["u"] = tuple(device(key) for key in wanted)
            look()
            await eyes.until(lambda wanted=wanted: eyes.known() == {"u": wanted})  # type: ignore[misc]
        backend.hardware["v"] = ()
        listing.set()
        await eyes.until(lambda: "v" in eyes.known())
        assert eyes.sentences() == []


async def test_when_every_thread_hangs_it_is_said_and_heals(hanging: Hanging) -> None:
    backend = Fake()
    names = [f"hung{n}" for n in range(4)]
    backend.hardware = {name: hanging.unit(device(name), name=name) for name in names} | {"z": (device("z"),)}
    async with looking(Eyes(backend, options={"unit_deadline": 0.01})) as eyes:
        assert any(s.startswith("all 4 threads of fake hang; its devices are") for s in eyes.sentences())
        assert eyes.known() == {}
        hanging.let_go("hung0")
        await eyes.until(lambda: eyes.known() == {"hung0": ["hung0"], "z": ["z"]})
        hanging.let_go()
        await eyes.until(lambda: len(eyes.known()) == 5)
        await eyes.until_noted(lambda: not eyes.it.problems)


async def test_another_backend_sees_at_once_while_one_hangs(hanging: Hanging) -> None:
    broken, well = Fake(), Fake()
    broken.hardware = {"hung": hanging.unit()}
    well.hardware = {"u": ()}
    one, other = Eyes(broken, options={"unit_deadline": 10.0}), Eyes(well, kind="other")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.it.run)
        await one.until_noted(lambda: bool(hanging.entered))
        async with looking(other):
            began = time.monotonic()
            other.it.rescan()
            await other.until(lambda: len(other.news) == 2)
            assert time.monotonic() - began < 0.5
        tasks.cancel_scope.cancel()


async def test_cancellation_ends_at_once_although_a_read_hangs_and_nobody_misses_what_it_raises() -> None:
    entered, let_go, left = threading.Event(), threading.Event(), threading.Event()
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))

    def read() -> list[str]:
        entered.set()
        let_go.wait(10)
        left.set()
        raise OSError("too late")

    eyes = Eyes()
    eyes.backend.listed = read
    task = asyncio.create_task(eyes.it.run())
    await eyes.until_noted(entered.is_set)
    began = time.monotonic()
    task.cancel()
    await asyncio.wait([task])
    assert time.monotonic() - began < 0.5
    let_go.set()
    await eyes.until_noted(left.is_set)
    await asyncio.sleep(0.01)
    del task
    assert complaints == []


# --- what raises ---


def failing(sentence: str = "no such luck") -> Callable[[], Any]:
    def fail() -> Any:
        raise OSError(sentence)

    return fail


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_RETRY_FIRST", 0.01)


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("answer", [failing(), lambda: None, lambda: Discovery(("nonsense",))])  # type: ignore[arg-type]
async def test_a_unit_that_cannot_be_read_keeps_what_was_known_and_is_tried_again(answer: Callable[[], Any]) -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),), "v": ()}
    async with looking(Eyes(backend)) as eyes:
        backend.hardware |= {"u": answer, "v": (device("v"),)}
        eyes.it.rescan()
        await eyes.until(lambda: eyes.known() == {"u": ["u"], "v": ["v"]})
        await eyes.until_noted(lambda: len(eyes.sentences()) == 1)
        assert eyes.sentences()[0].startswith("u cannot be read: ")
        backend.hardware["u"] = ()
        await eyes.until(lambda: eyes.known() == {"u": [], "v": ["v"]})
        await eyes.until_noted(lambda: not eyes.it.problems)


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("answer", [failing(), lambda: None, lambda: "gpu0", lambda: [7]])
async def test_a_backend_that_cannot_list_keeps_what_was_known_and_is_tried_again(answer: Callable[[], Any]) -> None:
    backend = Fake()
    backend.hardware = {"u": (device("u"),)}
    whole = backend.listed
    async with looking(Eyes(backend)) as eyes:
        backend.listed = answer
        eyes.it.rescan()
        await eyes.until_noted(lambda: len(eyes.sentences()) == 1)
        assert eyes.sentences()[0].startswith("backend fake cannot list its units: ")
        assert eyes.known() == {"u": ["u"]}
        backend.hardware = {"v": ()}
        backend.listed = whole
        await eyes.until(lambda: eyes.known() == {"v": []})
        await eyes.until_noted(lambda: not eyes.it.problems)


async def test_a_unit_is_tried_again_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_RETRY_FIRST", 0.004)
    monkeypatch.setattr(discovery, "_RETRY_MOST", 0.016)
    now = 0.0
    eyes = Eyes(options={"clock": lambda: now})
    eyes.it._retry("u", failed=True)
    delays = []
    for _ in range(5):
        (at, _delay) = eyes.it._retries["u"]
        delays.append(round(at - now, 3))
        now = at
        eyes.it._collect_retries(now)
        eyes.it._retry("u", failed=True)
    assert delays == [0.004, 0.008, 0.016, 0.016, 0.016]


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
    assert [(line["event"], line.get("problem")) for line in logs] == [
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
        await eyes.until_noted(lambda: not eyes.it.problems and not eyes.it._retries)


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
    assert logs[0]["problem"].startswith("affects() failed on PathChange(")


# --- what it listens to ---


async def test_what_to_listen_to_is_asked_again_when_something_new_is_known() -> None:
    wanted: list[tuple[str, Watches]] = []
    eyes = Eyes(options={"on_watches": lambda kind, watches: wanted.append((kind, watches))})
    eyes.backend.watched = lambda: Watches(subsystems=frozenset({"drm"}))
    async with looking(eyes):
        assert wanted == []
        eyes.backend.hardware = {"u": ()}
        eyes.it.rescan()
        await eyes.until_noted(lambda: bool(wanted))
        eyes.it.rescan()
        await eyes.until(lambda: len(eyes.news) == 3)
        assert wanted == [(KIND, Watches(subsystems=frozenset({"drm"})))]


@pytest.mark.parametrize("answer", [failing(), lambda: None])
async def test_watches_that_fail_are_none_and_said_until_they_do_not(answer: Callable[[], Any]) -> None:
    eyes = Eyes()
    eyes.backend.watched = answer
    assert eyes.it.watches() == Watches()
    assert eyes.sentences()[0].startswith("watches() failed: ")
    eyes.backend.watched = Watches
    assert eyes.it.watches() == Watches()
    assert eyes.sentences() == []


async def test_every_event_is_refused_to_a_backend_that_does_not_say_what_each_is_about() -> None:
    eyes = Eyes()
    eyes.backend.watched = lambda: Watches(frozenset({ANY_SUBSYSTEM}))
    assert eyes.it.watches() == Watches(frozenset({ANY_SUBSYSTEM}))

    class Forgetful(Fake):
        affects = Backend.affects

    eyes.it.backend = Forgetful()
    eyes.it.backend.watched = eyes.backend.watched
    assert eyes.it.watches() == Watches()
    assert "affects() does not say what each is about" in eyes.sentences()[0]
