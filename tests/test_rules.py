"""No test waits for a moment or bounds the clock: such a test fails on a slow machine, which is no fault of Fairlead's."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_TESTS: Final = Path(__file__).parent
_MAY: Final = {"wait.py", "pauses.py", "loop_steps.py", "simulation/conformance/example.py"}
"""These are what others wait with, what makes tests slow on purpose, what bench/ measures with, and a plugin whose time
passes at once (`tests.wait.at_once`)."""

_IMPORT: Final = re.compile(r"^from agent\S* import", re.MULTILINE)
_CLOCKS: Final = {"monotonic", "perf_counter", "process_time", "thread_time"}
_LIMITS: Final = {"timeout", "timeout_at", "wait_for", "fail_after", "fail_at", "move_on_after", "move_on_at"}


def _measures(path: Path) -> bool:
    """Whether it is a program that measures, as in bench/, that has a clock of its own, or that people run on a cluster."""
    return path.parent in (_TESTS / "deterministic", _TESTS / "soak", _TESTS / "cluster") and not path.name.startswith(
        "test_"
    )


def broken_rules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each line of a module that reads the clock, sleeps or sets a limit, with what to use instead."""
    names = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = names.get(ast.unparse(node.func), ast.unparse(node.func))
            module, _, name = called.rpartition(".")
            if module == "time" and name == "sleep":
                yield node.lineno, "sleeps: wait for a condition with tests.wait.until or block_until"
            elif module in {"asyncio", "anyio"} and name == "sleep" and not _is_zero(node.args):
                yield node.lineno, "sleeps: tests.wait has until, settled and pass_time"
            elif module == "time" and name.removesuffix("_ns") in _CLOCKS:
                yield node.lineno, "measures time: speed belongs in bench/, time in a test is injected"
            elif module in {"asyncio", "anyio"} and name in _LIMITS:
                yield node.lineno, "bounds the clock: use tests.wait.limit, or pass_time for a deadline that is due"
            for keyword in node.keywords:
                if keyword.arg == "timeout" and isinstance(keyword.value, ast.Constant) and keyword.value.value:
                    yield node.lineno, "bounds the clock: the only limit is tests.wait.PATIENCE"
        elif isinstance(node, ast.Compare | ast.BinOp):
            operands = [node.left, *(node.comparators if isinstance(node, ast.Compare) else [node.right])]
            if not isinstance(node, ast.BinOp) or isinstance(node.op, ast.Sub):
                for operand in operands:
                    if isinstance(operand, ast.Call) and ast.unparse(operand.func) in {"time.time", "time.time_ns"}:
                        yield node.lineno, "compares the clock: time in a test is injected"


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a bare name stands for that was imported from a module of clocks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in {"time", "asyncio", "anyio"}:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _is_zero(arguments: list[ast.expr]) -> bool:
    return len(arguments) == 1 and isinstance(arguments[0], ast.Constant) and arguments[0].value == 0


def missing(source: str) -> Iterator[str]:
    """What this module's text has a process of its own patch (`module.NAME = …` after its import) that is not there."""
    for text in ast.walk(ast.parse(source)):
        if isinstance(text, ast.Constant) and isinstance(text.value, str) and _IMPORT.search(text.value):
            yield from (f"line {text.lineno}: {what}" for what in _missing(text.value))


def _missing(prelude: str) -> Iterator[str]:
    try:
        nodes = list(ast.walk(ast.parse(prelude)))
    except SyntaxError:
        return  # a piece of a module
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    modules = {it.asname or it.name: f"{node.module}.{it.name}" for node in imports for it in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            patched = modules.get(ast.unparse(node.value), "")
            if patched and not hasattr(pkgutil.resolve_name(patched), node.attr):
                yield f"{patched} has no {node.attr}"


def test_what_a_test_patches_in_a_process_of_its_own_is_there() -> None:
    found = [f"{path}: {what}" for path in _TESTS.rglob("*.py") for what in missing(path.read_text())]
    assert not found, "\n" + "\n".join(found)
    assert list(missing('P = """\nfrom agent.runtime import limits\nlimits.NO_SUCH = 1"""'))


def test_no_test_sleeps_or_bounds_the_clock() -> None:
    found = [
        f"{path.relative_to(_TESTS.parent)}:{line}: {why}"
        for path in sorted(_TESTS.rglob("*.py"))
        if path.relative_to(_TESTS).as_posix() not in _MAY and not _measures(path)
        for line, why in sorted(broken_rules(ast.parse(path.read_text())))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(0.1)",
        "from time import sleep\nsleep(1)",
        "await asyncio.sleep(0.01)",
        "await anyio.sleep(seconds)",
        "assert time.monotonic() - began < 5",
        "from time import perf_counter as now\nnow()",
        "time.thread_time_ns()",
        "asyncio.timeout(5)",
        "await asyncio.wait_for(it, 0.05)",
        "with anyio.fail_after(5): pass",
        "subprocess.run(command, timeout=10)",
        "assert until > time.time()",
        "took = time.time() - began",
    ],
)
def test_a_test_that_depends_on_the_machines_speed_is_named_with_what_to_use_instead(line: str) -> None:
    source = "async def test(): \n" + "\n".join(f"    {part}" for part in line.splitlines())
    assert list(broken_rules(ast.parse(source)))


@pytest.mark.parametrize(
    "line",
    [
        "await asyncio.sleep(0)",
        "clock = time.monotonic",
        "drain(until=time.time() + 60)",
        "run(timeout=PATIENCE)",
        "run(timeout=None)",
    ],
)
def test_a_test_that_hands_a_clock_on_breaks_no_rule(line: str) -> None:
    assert not list(broken_rules(ast.parse(f"async def test(): {line}")))
