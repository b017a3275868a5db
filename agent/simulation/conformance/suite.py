"""The checks as a table, and how they are run: each scenario is played once, and all its checks judge what it left."""

from __future__ import annotations

import enum
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final

from msgspec import Struct

from agent.simulation.conformance.stage import Stage, Terms
from agent.simulation.conformance.timeline import Judge, NotApplicable, Skipped, Timeline

Scenario = Callable[[Stage], Awaitable[None]]
"""Drives a plugin. Raises Skipped if that cannot be done."""


class Check(Struct, frozen=True):
    """One thing that a kubelet takes for granted of a plugin."""

    name: str
    subject: str
    sentence: str
    """What a kubelet does there, for the plugin's author."""
    line: str
    """Of the kubelet contract: the part of docs/conformance.md."""
    scenario: Scenario
    judge: Judge
    follows: str = ""
    """The check whose failure explains this one's: where both fail, this one is skipped."""


class Outcome(enum.StrEnum):
    """What came of a check."""

    PASS = "pass"  # noqa: S105  # no password
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"
    SKIPPED = "skipped"


class Result(Struct, frozen=True):
    """A check's outcome, and why it is none that is passed."""

    check: Check
    outcome: Outcome
    why: str = ""


_OFFERS_NOTHING: Final = "the plugin offered nothing in the scenario before"

CHECKS: list[Check] = []
"""The table: `checks/` fills it, in the order of its import."""


def check(scenario: Scenario, line: str, follows: str = "") -> Callable[[Judge], Judge]:
    """Enter a judge into the table: its name is the check's, its docstring the sentence."""

    def enter(judge: Judge) -> Judge:
        CHECKS.append(
            Check(
                name=judge.__name__.replace("_", "-"),
                subject=judge.__module__.rpartition(".")[2],
                sentence=" ".join((inspect.getdoc(judge) or "").split()),
                line=line,
                scenario=scenario,
                judge=judge,
                follows=follows,
            )
        )
        return judge

    return enter


async def run(checks: Iterable[Check], terms: Terms) -> AsyncIterator[Result]:
    """Play each scenario that these checks need, and judge; the results come as soon as they are known.

    Raises:
        OSError: the plugin cannot be started, or the kubelet's sockets cannot be made.
    """
    by_scenario: dict[Scenario, list[Check]] = {}
    for one in checks:
        by_scenario.setdefault(one.scenario, []).append(one)
    failed: list[str] = []
    for scenario, judged in by_scenario.items():
        if terms.known or not terms.is_tried:
            played = await _play(scenario, terms, judged)
        else:
            played = ": see ".join((_OFFERS_NOTHING, *failed[:1]))
        for one in judged:
            result = _judge(one, played)
            if result.outcome is Outcome.FAIL and one.follows in failed:
                result = Result(one, Outcome.SKIPPED, f"{result.why}: see {one.follows}")
            elif result.outcome is Outcome.FAIL:
                failed.append(one.name)
            yield result


async def _play(scenario: Scenario, terms: Terms, judged: Iterable[Check]) -> Timeline | str:
    """What happened, or why nothing could."""
    title = f"{inspect.getdoc(scenario)} ({', '.join(it.name for it in judged)})"
    async with Stage(terms, title) as stage:
        try:
            await scenario(stage)
        except Skipped as reason:
            return str(reason)
        return stage.timeline()


def _judge(check: Check, played: Timeline | str) -> Result:
    if isinstance(played, str):
        return Result(check, Outcome.SKIPPED, played)
    try:
        why = check.judge(played)
    except NotApplicable as reason:
        return Result(check, Outcome.NOT_APPLICABLE, str(reason))
    except Skipped as reason:
        return Result(check, Outcome.SKIPPED, str(reason))
    if why and (ended := played.ended()) and ended not in why:
        why = f"{why}: {ended}"
    return Result(check, Outcome.FAIL if why else Outcome.PASS, why)
