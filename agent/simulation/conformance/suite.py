"""The checks as a table, how they are run, and what came of them for machines: TAP, JUnit's XML and JSON.

Each scenario is played once, and all its checks judge what it left.
"""

from __future__ import annotations

import enum
import inspect
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

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


def check(scenario: Scenario, line: str, follows: str = "", *, subject: str = "") -> Callable[[Judge], Judge]:
    """Enter a judge into the table: its name is the check's, its docstring the sentence, its module's name the usual subject."""

    def enter(judge: Judge) -> Judge:
        CHECKS.append(
            Check(
                name=judge.__name__.replace("_", "-"),
                subject=subject or judge.__module__.rpartition(".")[2],
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


# --- what came of them ---


def counts(results: Sequence[Result]) -> str:
    """How many checks there are of each outcome, in words."""
    found = Counter(result.outcome for result in results)
    words = {Outcome.PASS: "passed", Outcome.FAIL: "failed"}
    return ", ".join(f"{found[one]} {words.get(one, one)}" for one in Outcome if found[one]) or "no check was made"


def document(results: Sequence[Result], facts: Mapping[str, str]) -> dict[str, Any]:
    """All of it as one JSON object; `facts` say what was tried."""
    return {
        **facts,
        "checks": [
            {
                "name": it.check.name,
                "subject": it.check.subject,
                "outcome": it.outcome,
                "why": it.why,
                "kubelet": it.check.sentence,
                "contract": it.check.line,
            }
            for it in results
        ],
    }


def _tap(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    """TAP 14 (testanything.org)."""
    lines = ["TAP version 14", f"1..{len(results)}", *(f"# {name}: {value}" for name, value in facts.items())]
    for number, it in enumerate(results, start=1):
        word = "not ok" if it.outcome is Outcome.FAIL else "ok"
        reason = "" if it.outcome in (Outcome.PASS, Outcome.FAIL) else f" # SKIP {it.outcome}: {_one_line(it.why)}"
        lines.append(f"{word} {number} - {it.check.name}{reason}")
        if it.outcome is Outcome.FAIL:
            lines += ["  ---", f"  message: {json.dumps(it.why)}", f"  kubelet: {json.dumps(it.check.sentence)}"]
            lines += [f"  contract: {it.check.line}", "  ..."]
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _junit(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    """JUnit's XML, as CI systems read it."""
    tree = Element("testsuites", name="fairlead conformance")
    for subject, group in groupby(results, key=lambda it: it.check.subject):
        of = list(group)
        failures = sum(it.outcome is Outcome.FAIL for it in of)
        skipped = sum(it.outcome in (Outcome.NOT_APPLICABLE, Outcome.SKIPPED) for it in of)
        suite = SubElement(
            tree,
            "testsuite",
            name=subject,
            tests=str(len(of)),
            failures=str(failures),
            skipped=str(skipped),
            errors="0",
        )
        properties = SubElement(suite, "properties")
        for name, value in facts.items():
            SubElement(properties, "property", name=name, value=_xml(value))
        for it in of:
            case = SubElement(suite, "testcase", classname=subject, name=it.check.name)
            if it.outcome is Outcome.FAIL:
                text = f"{it.why}\n\nWhat a kubelet does ({it.check.line}): {it.check.sentence}"
                SubElement(case, "failure", message=_xml(it.why)).text = _xml(text)
            elif it.outcome is not Outcome.PASS:
                SubElement(case, "skipped", message=_xml(f"{it.outcome}: {it.why}"))
    indent(tree)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(tree, encoding="unicode")


def _xml(text: str) -> str:
    """The text without what XML 1.0 has no way to write; a plugin's message may have anything."""
    return "".join(c if c in "\t\n" or c.isprintable() else "�" for c in text)


def _json(results: Sequence[Result], facts: Mapping[str, str]) -> str:
    return json.dumps(document(results, facts), indent=2)


FORMATS: Final[Mapping[str, Callable[[Sequence[Result], Mapping[str, str]], str]]] = {
    "tap": _tap,
    "junit": _junit,
    "json": _json,
}
