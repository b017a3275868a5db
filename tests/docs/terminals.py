"""A reader's terminals: they run what a page says to type, and compare what is printed with what the page shows."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from tests.docs.pages import Command, as_printed
from tests.wait import limit

_SERVERS: Final = ("python -m agent.simulation", "fairlead run", "fairlead demo")
"""Commands that run until they are stopped."""
_FOLLOWS: Final = ("--watch", "--follow")
"""Options with which a command goes on until somebody has seen enough."""
_DOCTOR: Final = "fairlead doctor"
_FINDINGS: Final = (0, 1, 2)
"""Its exit codes: how bad what it found is."""


_LATER: Final = "fairlead status"
"""What it prints comes true in a moment: the kubelet tells whose a device is after it has it allocated."""


class Terminals:
    """A reader's terminals, all in one directory.

    Args:
        directory: where they are.
        path: where commands are looked for before all other places.
        environment: what they have beyond this process's.
    """

    def __init__(
        self,
        directory: Path,
        path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._exports = ""
        search = [*map(str, path), str(Path(sys.executable).parent), os.environ["PATH"]]
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON"))} | {
            "PATH": ":".join(search),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # what our own tests need, and takes a second to be imported
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        self._servers: list[Process] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            if server.returncode is None:
                server.send_signal(signal.SIGTERM)
        for server in self._servers:
            await server.communicate()

    async def follow(self, command: Command) -> None:
        """Do what the page says; what is printed must be what it shows, if it shows anything."""
        text = command.text
        if text.startswith("export "):
            self._exports += text + "\n"
        elif not text:
            await self._first_server_prints(command)
        elif text.startswith(_SERVERS):
            self._servers.append(await self._start(f"exec {text}"))
            await self._first_server_prints(command)
        elif any(option in text.split("#")[0].split() for option in _FOLLOWS):
            await self._says_something(text)
        else:
            fine = _FINDINGS if text.startswith(_DOCTOR) else (0,)
            code, printed = await self._run(text)
            assert command.printed or code in fine, f"{text}: {code}: {printed}"
            if command.printed is not None:
                async with limit(f"{text} prints what the page shows", lambda: printed):
                    while text.startswith(_LATER) and not _shown(printed, command.printed):
                        _, printed = await self._run(text)
                assert _shown(printed, command.printed), printed

    async def _run(self, command: str) -> tuple[int | None, list[str]]:
        process = await self._start(command)
        printed = (await process.communicate())[0].decode().splitlines()
        return process.returncode, printed

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

    async def _says_something(self, command: str) -> None:
        process = await self._start(f"exec {command}")
        assert process.stdout is not None
        async with limit(f"{command} says something"):
            assert await process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        await process.communicate()

    async def _first_server_prints(self, command: Command) -> None:
        """Wait for these lines, one after the other, with others between."""
        output = self._servers[0].stdout
        assert output is not None
        for printed in command.printed or ():
            said: list[str] = []
            async with limit(f"it says {printed}", said.copy):
                while not said or not as_printed(said[-1], printed):
                    said.append((await output.readline()).decode().rstrip("\n"))
                    assert said[-1], said


def _shown(printed: Sequence[str], page: Sequence[str]) -> bool:
    return len(printed) == len(page) and all(map(as_printed, printed, page))
