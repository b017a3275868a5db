"""A pytest plugin that pauses between any two statements of a test, now and then: what passes by luck fails.

    python -m pytest -p tests.pauses tests/e2e

Sometimes the whole process stands still, as on a busy machine, while agents and threads go on; sometimes the test alone
does, while its own kubelet goes on. A test that asserts what is true for a moment only, or that expects two things to
happen in an order that nobody promises, fails here within a few runs. Those that count turns of the event loop or
measure times, and the longest property tests, fail here and are well: of use for tests with processes and threads.
"""

from __future__ import annotations

import ast
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any, Final

import _pytest.assertion.rewrite as rewriting
import pytest

SHARE: Final = 0.3
"""Of the statements that have a pause before them."""

LONGEST: Final = 0.1
"""Seconds; the retries and delays of what is tested are mostly shorter."""

_TESTS: Final = Path(__file__).parent
_HERE: Final = "pauses_of_tests"
_BLOCKS: Final = ("body", "orelse", "finalbody")
_chance: Final = random.Random()


def pause() -> None:
    """Perhaps hold up the whole process."""
    if _chance.random() < SHARE:
        time.sleep(_chance.uniform(0, LONGEST))


async def pause_alone() -> None:
    """Perhaps hold up the whole process, perhaps only who awaits this."""
    if _chance.random() < 0.5:
        pause()
    elif _chance.random() < SHARE:
        await asyncio.sleep(_chance.uniform(0, LONGEST))


def with_pauses(tree: ast.Module) -> ast.Module:
    """The module with a pause before every statement of its functions; it is changed in place."""
    _Inserter().visit(tree)
    where = next((n for n, statement in enumerate(tree.body) if not _comes_first(statement)), 0)
    tree.body.insert(where, ast.parse(f"import {__name__} as {_HERE}").body[0])
    return ast.fix_missing_locations(tree)


def _comes_first(statement: ast.stmt) -> bool:
    """Whether it is a docstring, or an import from the future."""
    return isinstance(statement, ast.Expr) or (
        isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
    )


class _Inserter(ast.NodeTransformer):
    def __init__(self) -> None:
        self._call = ""  # what pauses in the innermost function; none in a class or module

    def generic_visit(self, node: ast.AST) -> ast.AST:
        outer = self._call
        if isinstance(node, ast.AsyncFunctionDef):
            self._call = f"await {_HERE}.pause_alone()"
        elif isinstance(node, ast.FunctionDef):
            self._call = f"{_HERE}.pause()"
        elif isinstance(node, ast.ClassDef):
            self._call = ""
        super().generic_visit(node)
        if self._call:
            for name in _BLOCKS:
                self._insert(node, name)
        self._call = outer
        return node

    def _insert(self, node: ast.AST, name: str) -> None:
        block = getattr(node, name, None)
        if not isinstance(block, list):  # as of a lambda or a conditional expression
            return
        paused: list[ast.stmt] = []
        for statement in block:
            if not isinstance(statement, ast.Global | ast.Nonlocal) and not (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and statement is block[0]
                and ast.get_docstring(node) is not None
            ):
                paused += (_located(each, statement) for each in ast.parse(self._call).body)
            paused.append(statement)
        setattr(node, name, paused)


def _located(statement: ast.stmt, beside: ast.stmt) -> ast.stmt:
    for node in ast.walk(statement):
        ast.copy_location(node, beside)
    return statement


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Change what pytest reads of test modules, before it writes its own checks into them."""
    patched = pytest.MonkeyPatch()
    early_config.add_cleanup(patched.undo)
    rewrite = rewriting.rewrite_asserts

    def paused(mod: ast.Module, source: bytes, module_path: str | None = None, config: Any = None) -> None:
        if module_path and _TESTS in Path(module_path).parents:
            with_pauses(mod)
        rewrite(mod, source, module_path, config)

    patched.setattr(rewriting, "rewrite_asserts", paused)
    # what pytest keeps of modules between runs has no pauses, and must not get any
    patched.setattr(rewriting, "PYC_TAIL", f"-{_HERE}{rewriting.PYC_TAIL}")
    patched.setattr(sys, "dont_write_bytecode", True)
