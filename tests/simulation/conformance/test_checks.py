"""Each check passes a plugin that does all it should, and fails one with the fault that it is there for: that check and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.simulation.conformance.checks import CHECKS
from agent.simulation.conformance.stage import Terms
from agent.simulation.conformance.suite import Check, Outcome, Result, run
from agent.simulation.sockets import Version
from tests.simulation.conformance.example import OTHER, TOY, World
from tests.wait import at_once

ROUNDS = 20  # restarts in the checks of many


async def tried(tmp_path: Path, world: World, checks: list[Check], version: Version = "1.36") -> list[Result]:
    hooks = {"unplug": world.unplug, "plug": world.plug}
    terms = Terms(world.launch, tmp_path, version, rounds=ROUNDS, hooks=hooks, known={TOY, OTHER})

    async def results() -> list[Result]:
        return [result async for result in run(checks, terms)]

    return await at_once(results())


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


async def test_a_scenario_that_starts_no_plugin_says_nothing_of_the_next(tmp_path: Path) -> None:
    checks = [it for it in CHECKS if it.name in {"stream-ended", "unplug-is-told", "sigterm-ends"}]

    async def outcomes() -> list[Outcome]:
        return [it.outcome async for it in run(checks, Terms(World().launch, tmp_path, "1.37"))]

    assert await at_once(outcomes()) == [Outcome.NOT_APPLICABLE, Outcome.SKIPPED, Outcome.PASS]
