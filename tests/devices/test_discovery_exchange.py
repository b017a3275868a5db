"""Another instance of a backend takes the place of the one in force, while that goes on looking."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from backends.base import HostPath, Signal, Verdict, Watches
from tests.devices.fakes import Fake, device
from tests.devices.test_discovery import HINT, Eyes, Hanging, failing, hanging, looking

__all__ = ["hanging"]  # a fixture


def other(*keys: str) -> Fake:
    """An instance that finds these."""
    backend = Fake()
    backend.hardware = {key: [device(key, "other")] for key in keys}
    return backend


@pytest.fixture
def eyes() -> Eyes:
    eyes = Eyes()
    eyes.backend.hardware = {
        "kept": [device("kept", "other")],
        "changed": [device("changed")],
        "gone": [device("gone")],
    }
    return eyes


async def test_what_the_other_finds_is_told_to_whoever_exchanges_them_and_only_what_is_new(eyes: Eyes) -> None:
    async with looking(eyes):
        eyes.news.clear()
        fresh = other("kept", "changed", "came")
        fresh.seen = lambda found: [Signal(found.key, "sick", Verdict.NOW, "It is sick.")]
        found = await eyes.it.look_ahead(fresh)
        assert eyes.news == []
        assert eyes.known() == {"kept": ["kept"], "changed": ["changed"], "gone": ["gone"]}
        news = eyes.it.exchange(fresh, found)
        assert {unit: len(devices) for unit, devices in news.units.items()} == {"changed": 1, "came": 1, "gone": 0}
        assert {unit: len(signals) for unit, signals in news.signals.items()} == {
            "kept": 1, "changed": 1, "came": 1, "gone": 0,
        }  # fmt: skip
        assert eyes.it.backend is fresh
        assert news.anew
        await eyes.until(lambda: bool(eyes.news))  # it looks at everything again
        assert not eyes.news[0].anew
        assert eyes.news[0].units == {}
        assert len(fresh.looked) == 6


async def test_what_happens_between_the_look_and_the_exchange_is_seen(eyes: Eyes) -> None:
    async with looking(eyes):
        fresh = other("kept", "changed")
        found = await eyes.it.look_ahead(fresh)
        del fresh.hardware["kept"]
        eyes.it.exchange(fresh, found)
        await eyes.until(lambda: "kept" not in eyes.known())


async def test_what_went_after_the_other_had_looked_and_is_back_is_told(eyes: Eyes) -> None:
    """Else it would be known to us, and listed nowhere, until it changes."""
    async with looking(eyes):
        fresh = other("kept")
        found = await eyes.it.look_ahead(fresh)
        del eyes.backend.hardware["kept"]
        eyes.it.rescan()
        await eyes.until(lambda: "kept" not in eyes.known())
        eyes.news.clear()
        eyes.news.append(eyes.it.exchange(fresh, found))
        await eyes.until(lambda: eyes.known() == {"kept": ["kept"]})
        assert [news.units["kept"] for news in eyes.news if "kept" in news.units] == [(device("kept", "other"),)]


async def test_what_came_after_the_other_had_looked_does_not_go_for_a_moment(eyes: Eyes) -> None:
    async with looking(eyes):
        fresh = other("kept", "came")
        del fresh.hardware["came"]
        found = await eyes.it.look_ahead(fresh)
        fresh.hardware["came"] = eyes.backend.hardware["came"] = [device("came", "other")]
        eyes.it.rescan()
        await eyes.until(lambda: "came" in eyes.known())
        news = eyes.it.exchange(fresh, found)
        assert set(news.units) == {"changed", "gone"}
        assert "came" in eyes.known()


async def test_what_changed_after_the_other_had_looked_is_not_set_back(eyes: Eyes) -> None:
    async with looking(eyes):
        fresh = other("kept", "changed")
        found = await eyes.it.look_ahead(fresh)
        eyes.backend.hardware["kept"] = [device("kept", "other", identity="another card")]
        eyes.it.rescan()
        await eyes.until(lambda: eyes.it.known["kept"][0].identity == "another card")
        assert set(eyes.it.exchange(fresh, found).units) == {"changed", "gone"}
        assert eyes.it.known["kept"][0].identity == "another card"


async def test_a_new_one_has_looked_when_it_has_looked_ahead() -> None:
    eyes = Eyes()
    fresh = other("a")
    news = eyes.it.exchange(fresh, await eyes.it.look_ahead(fresh))
    assert set(news.units) == {"a"}
    assert eyes.it.first_scan.is_set()


async def test_one_that_has_not_finished_in_time_keeps_what_was_known_until_it_has(eyes: Eyes) -> None:
    async with looking(eyes):
        fresh = other("a")
        news = eyes.it.exchange(fresh, None)
        assert news.units == {}
        assert news.anew
        assert set(eyes.known()) == {"kept", "changed", "gone"}
        await eyes.until(lambda: set(eyes.known()) == {"a"})


def refuse() -> Any:
    raise OSError("no such luck")


async def test_one_that_cannot_list_its_units_keeps_what_was_known_and_says_so(eyes: Eyes) -> None:
    async with looking(eyes):
        fresh = other()
        fresh.listed = refuse
        assert eyes.it.exchange(fresh, await eyes.it.look_ahead(fresh)).units == {}
        await eyes.until(lambda: eyes.sentences() == ["backend fake cannot list its units: no such luck"])
        assert set(eyes.known()) == {"kept", "changed", "gone"}


async def test_a_unit_that_the_other_cannot_read_keeps_what_was_known_and_is_tried_again(eyes: Eyes) -> None:
    async with looking(eyes):
        fresh = other("kept", "changed", "gone")
        fresh.hardware["changed"] = refuse
        news = eyes.it.exchange(fresh, await eyes.it.look_ahead(fresh))
        assert set(news.units) == {"gone"}
        assert eyes.sentences() == ["changed cannot be read: no such luck"]


async def test_what_to_listen_to_is_what_the_other_wants() -> None:
    wanted: list[Watches] = []
    eyes = Eyes(options={"on_watches": lambda _kind, watches: wanted.append(watches)})
    async with looking(eyes):
        wanted.clear()
        fresh = other()
        fresh.watched = lambda: Watches(directories=frozenset({HostPath("/dev/other")}))
        eyes.it.exchange(fresh, await eyes.it.look_ahead(fresh))
        assert wanted[0].directories == {HostPath("/dev/other")}


async def test_what_the_one_before_was_looking_at_is_not_taken_for_what_is_there(eyes: Eyes, hanging: Hanging) -> None:
    """Its walk ends after the exchange; all of it is looked at again, by the other."""
    async with looking(eyes):
        fresh = other("kept", "slow")
        eyes.backend.hardware["slow"] = hanging.unit(device("stale", unit="slow"))
        eyes.it.rescan()
        await eyes.until(lambda: bool(hanging.entered))
        eyes.news.clear()
        eyes.it.exchange(fresh, await eyes.it.look_ahead(fresh))
        waiting = asyncio.ensure_future(eyes.look_at("slow"))
        hanging.let_go()
        await waiting
        assert eyes.known() == {"kept": ["kept"], "slow": ["slow"]}
        assert all("stale" not in str(news) for news in eyes.news)


async def test_a_look_ahead_that_is_given_up_costs_nothing_but_its_thread(eyes: Eyes, hanging: Hanging) -> None:
    async with looking(eyes):
        fresh = other("kept")
        fresh.hardware["slow"] = hanging.unit()
        looking_ahead = asyncio.ensure_future(eyes.it.look_ahead(fresh))
        await eyes.until(lambda: hanging.entered)
        looking_ahead.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking_ahead
        eyes.backend.hardware["came"] = [device("came")]
        eyes.it.rescan()
        await eyes.until(lambda: "came" in eyes.known())
        hanging.let_go()


async def test_one_that_leaves_takes_everything_with_it_and_nobody_waits_for_it(eyes: Eyes, hanging: Hanging) -> None:
    async with looking(eyes):
        eyes.backend.hardware["slow"] = hanging.unit()
        waiting = asyncio.ensure_future(eyes.look_at("slow"))
        await eyes.until(lambda: bool(hanging.entered))
        news = eyes.it.leave()
        assert news.anew
        assert news.units == dict.fromkeys(["kept", "changed", "gone"], ())
        assert news.signals == dict.fromkeys(["kept", "changed", "gone"], ())
        await waiting
        hanging.let_go()


async def test_what_the_one_before_failed_on_is_no_problem_of_the_other(eyes: Eyes) -> None:
    async with looking(eyes):
        eyes.backend.affected = lambda _: failing()()
        eyes.it.hint(HINT)
        assert eyes.it.problems.keys() == {"affects"}
        eyes.it.exchange(other(), await eyes.it.look_ahead(other()))
        assert eyes.it.problems == {}
