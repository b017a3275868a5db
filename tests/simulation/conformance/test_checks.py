"""Each check passes a plugin that does all it should, and fails one with the fault that it is there for: that check and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.simulation.conformance.checks import CHECKS, registration
from agent.simulation.conformance.stage import Terms
from agent.simulation.conformance.suite import Check, Outcome, Result, run
from agent.simulation.conformance.timeline import Asked, Skipped, Timeline
from agent.simulation.model import Change, Kind, Version
from tests.simulation.conformance.example import OTHER, TOY, World
from tests.wait import at_once

ROUNDS = 20  # restarts in the checks of many


async def tried(tmp_path: Path, world: World, checks: list[Check], version: Version = "1.36") -> list[Result]:
    hooks = {"unplug": world.unplug, "plug": world.plug}
    terms = Terms(world.launch, tmp_path, version, rounds=ROUNDS, hooks=hooks, known={TOY, OTHER})

    async def results() -> list[Result]:
        return [result async for result in run(checks, terms)]

    return await at_once(results())


def test_a_check_follows_from_one_that_is_made_before_it() -> None:
    names = [it.name for it in CHECKS]
    assert all(it.follows in names[: names.index(it.name)] for it in CHECKS if it.follows)


@pytest.mark.parametrize("version", ["1.36", "1.37"])
async def test_a_plugin_without_faults_passes_every_check(tmp_path: Path, version: Version) -> None:
    results = await tried(tmp_path, World(), CHECKS, version)
    not_passed = {it.check.name: it.why for it in results if it.outcome is not Outcome.PASS}
    assert not_passed == ({} if version == "1.36" else {"stream-ended": "a kubelet from 1.37 on does not do that"})


@pytest.mark.parametrize("check", CHECKS, ids=[it.name for it in CHECKS])
async def test_a_check_finds_its_fault_and_no_other_of_its_scenario_does(tmp_path: Path, check: Check) -> None:
    beside = [it for it in CHECKS if it.scenario is check.scenario]
    results = await tried(tmp_path, World(frozenset({check.name})), beside)
    failed = {it.check.name for it in results if it.outcome is Outcome.FAIL}
    assert failed == {check.name}, {it.check.name: f"{it.outcome}: {it.why}" for it in results}


@pytest.mark.parametrize(
    ("way", "name"),
    [("it tries again each 30 s", "registration-retries"), ("its devices go together", "unplug-leaves-others")],
)
async def test_a_check_accuses_no_plugin_of_another_way_to_do_it(tmp_path: Path, way: str, name: str) -> None:
    beside = [it for it in CHECKS if it.name == name]
    (result,) = await tried(tmp_path, World(frozenset({way})), beside)
    assert (result.outcome, result.why) == (Outcome.PASS, "")


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("registration-arrives", "registration-version registration-once list-arrives list-health"),
        ("registration-endpoint", "registration-serves-first"),
        ("restart-registers", "restart-in-time restart-once restart-same-devices restart-then-unplug"),
        ("restart-registers", "unplug-keeps-held-for-restart"),
        ("restart-registers", "restart-wipes-files restart-same-inode restart-half-open restart-twice"),
        ("restart-registers", "restart-after-a-while restart-under-load restarts-register"),
        ("allocate-answers", "allocate-one-container allocate-cdi-names prestart-answers"),
        ("allocate-again", "allocate-any-order allocate-after-refusal"),
        ("preferred-answers", "preferred-available preferred-in-time"),
        ("prestart-answers", "prestart-again"),
        ("unplug-is-told", "unplug-leaves-others plug-brings-back"),
        ("killed-returns", "killed-is-noticed killed-same-devices"),
        ("update-returns", "update-is-noticed"),
        ("restarts-register", "restarts-memory restarts-descriptors"),
    ],
)
async def test_what_a_failed_check_leaves_unjudged_is_skipped_and_names_it(
    tmp_path: Path, fault: str, names: str
) -> None:
    scenarios = {it.scenario for it in CHECKS if it.name in {fault, *names.split()}}
    results = await tried(tmp_path, World(frozenset({fault})), [it for it in CHECKS if it.scenario in scenarios])
    found = {it.check.name: (it.outcome, it.why.rpartition(": ")[2]) for it in results}
    assert {name: found[name] for name in (fault, *names.split())} == {
        fault: (Outcome.FAIL, found[fault][1])
    } | dict.fromkeys(names.split(), (Outcome.SKIPPED, f"see {fault}"))
    assert Outcome.NOT_APPLICABLE not in {it.outcome for it in results}, results


@pytest.mark.parametrize(
    ("event", "see"),
    [
        (Asked(0, TOY, "v1beta2", "toy.sock", None, ()), "registration-version"),
        (Asked(0, "toy", "v1beta1", "toy.sock", None, ()), "registration-resource-name"),
        (Asked(0, TOY, "v1beta1", "toy.sock", None, (), "connection refused"), "registration-serves-first"),
        (Change(Kind.STREAM_OPENED, TOY), "list-arrives"),
    ],
)
def test_where_no_list_came_its_checks_name_the_one_that_says_why(event: Asked | Change, see: str) -> None:
    with pytest.raises(Skipped, match=f"no list came: see {see}$"):
        registration.list_health(Timeline((event,)))


async def test_a_scenario_that_starts_no_plugin_says_nothing_of_the_next(tmp_path: Path) -> None:
    checks = [it for it in CHECKS if it.name in {"stream-ended", "unplug-is-told", "sigterm-ends"}]

    async def outcomes() -> list[Outcome]:
        return [it.outcome async for it in run(checks, Terms(World().launch, tmp_path, "1.37"))]

    assert await at_once(outcomes()) == [Outcome.NOT_APPLICABLE, Outcome.SKIPPED, Outcome.PASS]


async def test_a_plugin_that_offers_nothing_is_told_which_check_says_so(tmp_path: Path) -> None:
    checks = [it for it in CHECKS if it.name in {"registration-arrives", "sigterm-ends"}]

    async def whys(checks: list[Check]) -> list[str]:
        terms = Terms(World(frozenset({"registration-arrives"})).launch, tmp_path)
        return [it.why async for it in run(checks, terms) if it.outcome is Outcome.SKIPPED]

    before = "the plugin offered nothing in the scenario before: see registration-arrives"
    assert await at_once(whys(checks)) == [before]
    assert await at_once(whys(checks[1:])) == ["the plugin offered nothing: it had 20 s: see registration-arrives"]


@pytest.mark.parametrize(
    ("fault", "name", "why"),
    [
        ("registration-retries", "registration-retries", "example.com/toy was not registered within 80 s"),
        ("list-arrives", "registration-retries", "example.com/toy was registered, and no list came within 80 s"),
        ("it cannot start twice", "killed-returns", "example.com/toy was not registered: "),
        ("it cannot start twice", "update-returns", "example.com/toy was not registered: "),
    ],
)
async def test_a_failure_says_what_is_missing_and_the_last_words_of_a_process_that_ended(
    tmp_path: Path, fault: str, name: str, why: str
) -> None:
    (result,) = await tried(tmp_path, World(frozenset({fault})), [it for it in CHECKS if it.name == name])
    ended = "its process ended by itself with code 1; its last words: bind: address in use"
    said = result.why.removeprefix("example.com/other, ")  # which may still have its stream when this is looked at
    assert (result.outcome, said) == (Outcome.FAIL, why + ended if why.endswith(": ") else why)
