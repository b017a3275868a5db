from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import _pytest.assertion.rewrite as rewriting
import pytest

from tests import pauses

MODULE = '''"""A module."""
from __future__ import annotations

class Thing:
    kind = "thing"

    def __method(self):
        """Do it."""
        if self.kind:
            return 1
        else:
            return 2

async def coming():
    global known
    known = [one async for one in others()]
    return lambda: 1
'''

PAUSED = '''"""A module."""
from __future__ import annotations
import tests.pauses as pauses_of_tests

class Thing:
    kind = "thing"

    def __method(self):
        """Do it."""
        pauses_of_tests.pause()
        if self.kind:
            pauses_of_tests.pause()
            return 1
        else:
            pauses_of_tests.pause()
            return 2

async def coming():
    global known
    await pauses_of_tests.pause_alone()
    known = [one async for one in others()]
    await pauses_of_tests.pause_alone()
    return lambda: 1
'''


def test_every_statement_of_a_function_has_a_pause_before_it() -> None:
    assert ast.unparse(pauses.with_pauses(ast.parse(MODULE))) == ast.unparse(ast.parse(PAUSED))


def test_pytest_reads_tests_with_pauses_and_other_modules_as_they_are() -> None:
    undo: list[Callable[[], None]] = []
    before = rewriting.rewrite_asserts
    pauses.pytest_load_initial_conftests(cast(pytest.Config, SimpleNamespace(add_cleanup=undo.append)))
    try:
        read = {}
        for path in (str(Path(__file__)), "/elsewhere/test_x.py"):
            tree = ast.parse(MODULE)
            rewriting.rewrite_asserts(tree, MODULE.encode(), path)
            read[path] = "pauses_of_tests.pause()" in ast.unparse(tree)
    finally:
        undo[0]()
    assert list(read.values()) == [True, False]
    assert rewriting.rewrite_asserts is before


async def test_a_pause_holds_up_everybody_or_only_who_awaits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[str] = []
    monkeypatch.setattr(pauses, "SHARE", 1.0)
    monkeypatch.setattr(time, "sleep", lambda _: slept.append("all"))

    async def sleep(_: float) -> None:
        slept.append("one")

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for _ in range(50):
        await pauses.pause_alone()
    monkeypatch.undo()
    assert len(slept) == 50
    assert set(slept) == {"all", "one"}
