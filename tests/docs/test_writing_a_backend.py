"""docs/writing-a-backend.md does what it says: its files, commands and outputs are taken from it as they are printed."""

from __future__ import annotations

import inspect
from typing import Final

import pytest

from agent.config.file import AgentConfig
from agent.discovery.discoverer import THREADS
from agent.discovery.reading import _RETRY_FIRST, _RETRY_MOST, UNIT_DEADLINE
from agent.discovery.runner import SETTLE
from agent.hardware import reconciler
from agent.hardware.adoption import READY_DEADLINE
from agent.hardware.releases import RELEASE_DEADLINE
from agent.kubelet.allocation import CLAIM_DEADLINE, PRE_START_DEADLINE
from backends.base import Backend
from tests.docs.pages import Command, blocks, text
from tests.docs.terminals import Terminals

NAME: Final = "docs/writing-a-backend.md"
PAGE: Final = text(NAME)


def files() -> dict[str, str]:
    return {block.file: block.text for block in blocks(NAME) if block.file}


def steps() -> list[Command]:
    return [command for block in blocks(NAME) for command in block.commands if not block.file]


async def test_it_works_as_printed(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("w")  # its sockets' paths may have 107 bytes
    for name, content in files().items():
        (directory / name).write_text(content)
    async with Terminals(directory) as terminals:
        for step in steps():
            await terminals.follow(step)


def test_it_has_what_it_is_tested_for() -> None:
    assert set(files()) == {"pretend.sh", "fairlead_ptp.py", "pyproject.toml", "test_fairlead_ptp.py"}
    assert len([step for step in steps() if step.text]) == 15
    assert len(files()["fairlead_ptp.py"].splitlines()) <= 70


def test_it_says_something_of_every_method() -> None:
    methods = {name for name, _ in inspect.getmembers(Backend, callable) if not name.startswith("_")}
    assert {name for name in methods if f"`{name}" not in PAGE} == {"resource"}


def test_its_times_are_those_in_force() -> None:
    rows = {row[0]: row[2] for line in PAGE.splitlines() if (row := [cell.strip() for cell in line.split("|")][1:])[2:]}
    assert {rows["`units`"], rows["`discover`, `probe` and `glance` of a unit"]} == {f"{UNIT_DEADLINE:g} s"}
    assert rows["`adopt` of a device"] == f"{READY_DEADLINE:g} s"
    assert rows["`claim`"] == f"{CLAIM_DEADLINE:g} s, with the look after it"
    assert rows["`prepare`"] == f"{PRE_START_DEADLINE:g} s, with the looks around it"
    assert rows["`release`"] == f"{RELEASE_DEADLINE:g} s"
    settings, words = AgentConfig(), " ".join(PAGE.split())
    for sentence in (
        f"tried again after {_RETRY_FIRST:g} s to {_RETRY_MOST:g} s",
        f"made again after {reconciler.RETRY_FIRST:g} s to {reconciler.RETRY_MOST:g} s",
        f"a backend has {THREADS} to read with,",
        f"its first look takes longer than {SETTLE:g} s",
        f"(`probe` in `[agent]`, every {settings.probe:g} s)",
        f"(`resync`, every {settings.resync / 60:g} min)",
    ):
        assert sentence in words
