"""Another instance of a backend looks beside the one in force, and takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from agent.discovery.discoverer import Discoverer
from agent.discovery.reading import Changes
from backends.base import HostPath, Signal, Verdict, Watches
from tests.discovery.test_discoverer import HINT, NEVER, Eyes, Hanging, failing, hanging, looking, seeing
from tests.fakes import KIND, Fake, device
from tests.wait import limit, until

__all__ = ["hanging"]  # a fixture


def other(*keys: str) -> Fake:
    """An instance that finds these."""
    backend = Fake()
    backend.hardware = {key: [device(key, "other")] for key in keys}
    return backend


@asynccontextmanager
async def beside(eyes: Eyes, backend: Fake, *, waits: bool = True) -> AsyncIterator[tuple[Discoverer, list[Changes]]]:
    """A discoverer for this instance, which has looked beside the one in force, and what it publishes."""
    news: list[Changes] = []
    fresh = Discoverer(KIND, backend, news.append, resync=NEVER, probe=NEVER, unit_deadline=NEVER, before=eyes.it)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fresh.run)
        async with limit("the first scan of another instance"):
            while waits and not fresh.first_scan.is_set():
                await fresh.first_scan.wait()
        yield fresh, news
        tasks.cancel_scope.cancel()


def known(it: Discoverer) -> dict[str, list[str]]:
    return {unit: [found.key for found in devices] for unit, devices in it.known.items()}


def sentences(it: Discoverer) -> list[str]:
    return [problem.sentence for problems in it.problems.values() for problem in problems]


@pytest.fixture
def eyes() -> Eyes:
    eyes = Eyes()
    eyes.backend.hardware = {
        "kept": [device("kept", "other")],
        "changed": [device("changed")],
        "gone": [device("gone")],
    }
    return eyes


async def test_what_differs_from_the_one_before_is_told_and_that_one_sees_nothing_of_it(eyes: Eyes) -> None:
    async with looking(eyes):
        eyes.news.clear()
        backend = other("kept", "changed", "came")
        backend.seen = lambda found: [Signal(found.key, "sick", Verdict.NOW, "It is sick.")]
        async with beside(eyes, backend) as (fresh, _):
            assert eyes.news == []
            assert eyes.known() == {"kept": ["kept"], "changed": ["changed"], "gone": ["gone"]}
            news = fresh.take_over(eyes.it)
            assert {unit: len(devices) for unit, devices in news.units.items()} == {"changed": 1, "came": 1, "gone": 0}
            assert {unit: len(signals) for unit, signals in news.signals.items()} == {
                "kept": 1, "changed": 1, "came": 1, "gone": 0,
            }  # fmt: skip
            assert news.by_reload
            assert eyes.known() == {"kept": ["kept"], "changed": ["changed"], "gone": ["gone"]}


async def test_what_happens_between_the_look_and_the_exchange_is_seen(eyes: Eyes) -> None:
    async with looking(eyes):
        backend = other("kept", "changed")
        async with beside(eyes, backend) as (fresh, news):
            del backend.hardware["kept"]
            fresh.take_over(eyes.it)
            fresh.rescan()
            await until(lambda: "kept" not in fresh.known)
            assert news[-1].units == {"kept": ()}


async def test_what_went_after_the_other_had_looked_and_is_back_is_told(eyes: Eyes) -> None:
    """Else it would be known to us, and listed nowhere, until it changes."""
    async with looking(eyes), beside(eyes, other("kept")) as (fresh, news):
        del eyes.backend.hardware["kept"]
        eyes.it.rescan()
        await eyes.until(lambda: "kept" not in eyes.known())
        news.clear()
        assert "kept" not in fresh.take_over(eyes.it).units
        fresh.rescan()
        await until(lambda: known(fresh) == {"kept": ["kept"]})
        assert [it.units["kept"] for it in news if "kept" in it.units] == [(device("kept", "other"),)]


async def test_what_came_after_the_other_had_looked_does_not_go_for_a_moment(eyes: Eyes) -> None:
    async with looking(eyes), beside(eyes, other("kept")) as (fresh, _):
        eyes.backend.hardware["came"] = [device("came", "other")]
        eyes.it.rescan()
        await eyes.until(lambda: "came" in eyes.known())
        assert set(fresh.take_over(eyes.it).units) == {"changed", "gone"}
        assert "came" in fresh.known


async def test_what_changed_after_the_other_had_looked_is_not_set_back(eyes: Eyes) -> None:
    async with looking(eyes), beside(eyes, other("kept", "changed")) as (fresh, _):
        eyes.backend.hardware["kept"] = [device("kept", "other", identity="another card")]
        eyes.it.rescan()
        await eyes.until(lambda: eyes.it.known["kept"][0].identity == "another card")
        assert set(fresh.take_over(eyes.it).units) == {"changed", "gone"}
        assert fresh.known["kept"][0].identity == "another card"


async def test_one_that_has_nobody_before_it_tells_all_that_it_has_found() -> None:
    async with looking(Eyes(other("a"))) as eyes:
        news = eyes.it.take_over(None)
        assert (set(news.units), set(news.signals), news.by_reload) == ({"a"}, {"a"}, True)


async def test_one_that_has_not_finished_in_time_keeps_what_was_known_until_it_has(
    eyes: Eyes, hanging: Hanging
) -> None:
    backend = other("a", "changed")

    def listed() -> list[str]:
        hanging.here()
        return ["a", "changed"]

    backend.listed = listed
    async with looking(eyes), beside(eyes, backend, waits=False) as (fresh, news):
        await eyes.until(lambda: hanging.entered)
        told = fresh.take_over(eyes.it)
        assert (told.units, told.signals, told.by_reload) == ({}, {}, True)
        assert set(known(fresh)) == {"kept", "changed", "gone"}
        hanging.let_go()
        await until(lambda: set(known(fresh)) == {"a", "changed"})
        assert [set(it.units) for it in news] == [{"a", "changed", "kept", "gone"}]


async def test_a_unit_that_hangs_keeps_what_was_known_of_it(eyes: Eyes, hanging: Hanging) -> None:
    backend = other("kept", "changed", "gone")
    backend.hardware["changed"] = hanging.unit(device("changed", "other"), name="changed")
    async with looking(eyes), beside(eyes, backend, waits=False) as (fresh, news):
        await until(lambda: {"gone", "kept"} <= {unit for it in news for unit in it.signals})
        told = fresh.take_over(eyes.it)
        assert set(told.units) == {"gone"}
        assert set(told.signals) == {"kept", "gone"}
        hanging.let_go()
        await until(lambda: fresh.known["changed"] == (device("changed", "other"),))


def refuse() -> None:
    raise OSError("no such luck")


async def test_one_that_cannot_list_its_units_keeps_what_was_known_and_says_so(eyes: Eyes) -> None:
    backend = other()
    backend.hardware, backend.listed = dict(eyes.backend.hardware), refuse
    async with looking(eyes), beside(eyes, backend) as (fresh, _):
        assert fresh.take_over(eyes.it).units == {}
        assert sentences(fresh) == ["backend fake cannot list its units: no such luck"]
        assert set(known(fresh)) == {"kept", "changed", "gone"}
        assert eyes.sentences() == []


async def test_a_unit_that_the_other_cannot_read_keeps_what_was_known_and_is_tried_again(eyes: Eyes) -> None:
    backend = other("kept", "changed", "gone")
    backend.hardware["changed"] = refuse
    async with looking(eyes), beside(eyes, backend) as (fresh, _):
        assert set(fresh.take_over(eyes.it).units) == {"gone"}
        assert sentences(fresh) == ["changed cannot be read: no such luck"]


async def test_what_is_wrong_is_so_until_the_other_has_seen_that_it_is_not(eyes: Eyes) -> None:
    eyes.backend.hardware["changed"] = refuse
    async with looking(eyes):
        assert eyes.sentences() == ["changed cannot be read: no such luck"]
        eyes.backend.affected = lambda _hint: refuse()
        eyes.it.hint(HostPath("/dev/x"))  # type: ignore[arg-type]
        fresh = Discoverer(KIND, other("changed"), eyes.publish, before=eyes.it)
        assert sentences(fresh) == ["changed cannot be read: no such luck"], "what this instance answers is not known"
        async with beside(eyes, other("changed")) as (fresh, _):
            assert sentences(fresh) == []


async def test_reads_that_hang_count_for_the_other_too_and_half_of_the_threads_are_for_what_does_not(
    eyes: Eyes, hanging: Hanging
) -> None:
    eyes.it.workers._limit = 4
    async with looking(seeing(hanging, eyes)):
        for number in (1, 2):
            eyes.backend.hardware[f"{number}"] = hanging.unit(name=f"{number}")
            eyes.it.rescan()
            await eyes.until(lambda number=number: len(eyes.sentences()) == number)  # type: ignore[misc]
            assert eyes.it.is_stuck is (number == 1)
        async with beside(eyes, other("kept")) as (fresh, _):
            assert fresh.workers is eyes.it.workers
            assert not eyes.it.is_stuck


async def test_one_that_leaves_keeps_nobody_waiting_and_its_end_leaves_nothing(eyes: Eyes, hanging: Hanging) -> None:
    async with looking(eyes):
        eyes.backend.hardware["slow"] = hanging.unit()
        waiting = asyncio.ensure_future(eyes.look_at("slow"))
        await eyes.until(lambda: bool(hanging.entered))
        news = eyes.it.nothing_left()
        assert news.by_reload
        assert news.units == dict.fromkeys(["kept", "changed", "gone"], ())
        assert news.signals == dict.fromkeys(["kept", "changed", "gone"], ())
        eyes.it.leave()
        await waiting
        hanging.let_go()


async def test_what_to_listen_to_is_asked_of_the_other(eyes: Eyes) -> None:
    backend = other()
    backend.watched = lambda: Watches(directories=frozenset({HostPath("/dev/other")}))
    async with looking(eyes), beside(eyes, backend) as (fresh, _):
        assert fresh.watches().directories == {HostPath("/dev/other")}


async def test_what_the_one_before_failed_on_is_no_problem_of_the_other(eyes: Eyes) -> None:
    async with looking(eyes):
        eyes.backend.affected = lambda _: failing()()
        eyes.it.hint(HINT)
        assert eyes.it.problems.keys() == {"affects"}
        async with beside(eyes, other()) as (fresh, _):
            assert fresh.problems == {}
            eyes.it.leave()
            assert eyes.it.problems == {}, "it is over, and told"
