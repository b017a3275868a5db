"""docs/troubleshooting.md has every finding of the doctor, in the doctor's own words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from agent.cli.doctor import CHECKS
from tests.docs.pages import REPOSITORY, text

_PAGE: Final = text("docs/troubleshooting.md")
_DOCTOR: Final = sorted((REPOSITORY / "agent/console/doctor").glob("*.py"))
_ASKS: Final = {"configuration", "daemon", "hardware", "state", "node-links", "policies", "witnesses", *CHECKS}
_TELLING: Final = 8  # letters; a sentence with fewer of its own is made by whoever it quotes


def _findings() -> Iterator[tuple[str, str]]:
    """Where the doctor says a sentence, and the sentence with `…` for what differs."""
    for path in _DOCTOR:
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                made = dict(_assigned(function))
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warning", "failure"):
                        sentence = made.get(ast.unparse(node.args[0])) or _sentence(node.args[0])
                        if sum(letter.isalpha() for letter in sentence) >= _TELLING:
                            yield f"{path.name}:{node.lineno}", sentence


def _assigned(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.JoinedStr):
            yield ast.unparse(node.targets[0]), _sentence(node.value)


def _sentence(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _said() -> set[str]:
    return {line.split(" | ")[0].removeprefix("| ") for line in _PAGE.splitlines() if line.startswith("| ")}


FINDINGS: Final = sorted(set(_findings()))


def test_the_doctor_says_something() -> None:
    assert len(FINDINGS) > 40


@pytest.mark.parametrize(("where", "sentence"), FINDINGS)
def test_a_finding_of_the_doctor_has_an_entry(where: str, sentence: str) -> None:
    assert sentence in _said(), f"{where} says something that docs/troubleshooting.md has no row for"


def test_every_check_and_every_part_of_the_daemon_has_its_place() -> None:
    headings = set(re.findall(r"`([a-z-]+)`", "".join(re.findall(r"^### .*$", _PAGE, re.MULTILINE))))
    assert headings == _ASKS
    named = headings | set(re.findall(r"^\| `([a-z-]+)` \|", _PAGE, re.MULTILINE))
    assert {part.replace(" ", "-") for part in _parts()} <= named


def _parts() -> Iterator[str]:
    """The parts of the daemon that report what is wrong with them, as `Problems.trouble` is told."""
    for path in Path(REPOSITORY / "agent").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="trouble"), args=[ast.Constant(value=str(part)), *_]) if part:
                    yield part


def test_every_check_that_a_symptom_names_is_one() -> None:
    named = {name for part in re.findall(r"`doctor`: ([^.|;]*)", _PAGE) for name in re.findall("`([^`]+)`", part)}
    assert named
    assert named <= _ASKS
