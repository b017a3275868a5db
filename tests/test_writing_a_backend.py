"""docs/writing-a-backend.md does what it says: its files, commands and outputs are taken from it as they are printed."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from agent.config.model import AgentConfig
from agent.daemon.supervisor import SETTLE
from agent.discovery.discoverer import UNIT_DEADLINE
from agent.discovery.schedule import _RETRY_FIRST, _RETRY_MOST
from agent.hardware import reconciler
from agent.hardware.adoption import ADOPT_DEADLINE
from agent.hardware.releases import RELEASE_DEADLINE
from agent.kubelet.allocation import CLAIM_DEADLINE
from agent.kubelet.prestart import PRE_START_DEADLINE
from agent.runtime.workers import LIMIT
from backends.base import Backend
from tests.wait import limit

PAGE: Final = (Path(__file__).parents[1] / "docs/writing-a-backend.md").read_text()
SERVERS: Final = ("python -m agent.simulation", "fairlead run")
"""Commands that run until they are stopped."""

_BLOCK: Final = re.compile(
    r"(?:`(?P<file>[\w.]+)`:\n\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Step:
    """A command and what it prints; without a command, what the first server prints then."""

    command: str
    printed: tuple[str, ...]


def files() -> dict[str, str]:
    return {block["file"]: block["text"] for block in _BLOCK.finditer(PAGE) if block["file"]}


def steps() -> list[Step]:
    found = []
    for block in _BLOCK.finditer(PAGE):
        if block["language"] == "console":
            command, *rest = re.split(r"^\$ ", block["text"], flags=re.MULTILINE)
            parts = [part.splitlines() for part in rest]
            if command:
                found.append(Step("", tuple(command.splitlines())))
            found += [Step(lines[0], tuple(lines[1:])) for lines in parts]
    return found


def is_as_printed(line: str, printed: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, printed.split("…"))), line) is not None


class Terminals:
    """A reader's terminals, all in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._exports = ""
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON"))} | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # what our own tests need, and takes a second to be imported
            "PYTHONUNBUFFERED": "1",
        }
        self._servers: list[Process] = []

    async def __aenter__(self) -> Terminals:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            if server.returncode is None:
                server.send_signal(signal.SIGTERM)
        for server in self._servers:
            await server.communicate()

    async def follow(self, step: Step) -> None:
        """Do what the page says; what is printed must be what it says."""
        if step.command.startswith("export "):
            self._exports += step.command + "\n"
        elif not step.command:
            await self._first_server_prints(step)
        elif step.command.startswith(SERVERS):
            self._servers.append(await self._start(f"exec {step.command}"))
            if step.printed:
                await self._first_server_prints(step)
        else:
            process = await self._start(step.command)
            printed = (await process.communicate())[0].decode().splitlines()
            assert len(printed) == len(step.printed), printed
            assert all(map(is_as_printed, printed, step.printed)), printed

    async def _start(self, command: str) -> Process:
        return await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            self._exports + command,
            cwd=self._directory,
            env=self._environment,
            stdout=PIPE,
            stderr=STDOUT,
        )

    async def _first_server_prints(self, step: Step) -> None:
        """Wait for these lines, one after the other, with others between."""
        output = self._servers[0].stdout
        assert output is not None
        for printed in step.printed:
            said: list[str] = []
            async with limit(f"it says {printed}", said.copy):
                while not said or not is_as_printed(said[-1], printed):
                    said.append((await output.readline()).decode().rstrip("\n"))
                    assert said[-1], said


async def test_it_works_as_printed(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("w")  # its sockets' paths may have 107 bytes
    for name, text in files().items():
        (directory / name).write_text(text)
    async with Terminals(directory) as terminals:
        for step in steps():
            await terminals.follow(step)


def test_it_has_what_it_is_tested_for() -> None:
    assert set(files()) == {"pretend.sh", "fairlead_ptp.py", "pyproject.toml", "test_fairlead_ptp.py"}
    assert len([step for step in steps() if step.command]) == 11
    assert len(files()["fairlead_ptp.py"].splitlines()) <= 70


def test_it_says_something_of_every_method() -> None:
    methods = {name for name, _ in inspect.getmembers(Backend, callable) if not name.startswith("_")}
    assert {name for name in methods if f"`{name}" not in PAGE} == {"resource"}


def test_its_times_are_those_in_force() -> None:
    rows = {row[0]: row[2] for line in PAGE.splitlines() if (row := [cell.strip() for cell in line.split("|")][1:])}
    assert {rows["`units`"], rows["`discover`, `probe` and `glance` of a unit"]} == {f"{UNIT_DEADLINE:g} s"}
    assert rows["`adopt` of a device"] == f"{ADOPT_DEADLINE:g} s"
    assert rows["`claim`"] == f"{CLAIM_DEADLINE:g} s, with the look after it"
    assert rows["`prepare`"] == f"{PRE_START_DEADLINE:g} s, with the looks around it"
    assert rows["`release`"] == f"{RELEASE_DEADLINE:g} s"
    settings, text = AgentConfig(), " ".join(PAGE.split())
    for sentence in (
        f"tried again after {_RETRY_FIRST:g} s to {_RETRY_MOST:g} s",
        f"made again after {reconciler.RETRY_FIRST:g} s to {reconciler.RETRY_MOST:g} s",
        f"a backend has {LIMIT},",
        f"its first look takes longer than {SETTLE:g} s",
        f"(`probe` in `[agent]`, every {settings.probe:g} s)",
        f"(`resync`, every {settings.resync / 60:g} min)",
    ):
        assert sentence in text
