"""What came of the checks, for machines: TAP, JUnit's XML and JSON; and the checks as a page's tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from agent.simulation.conformance.suite import Outcome, Result


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
