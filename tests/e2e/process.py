"""An agent in a process of its own, as `fairlead run` starts it; its log is read line by line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from tests import nodes

REPOSITORY: Final = Path(__file__).parents[2]
PATIENCE: Final = 20.0
"""Seconds; far beyond what anything here takes, for a machine that has other things to do, and still less than the 30 s
after which a probe would find what an event should have told of."""

MAIN: Final = ("" if nodes.can_make_nodes() else nodes.PRELUDE) + "from agent.cli import main; main()"

Line = dict[str, Any]


async def until(holds: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
    """Wait for what no event tells of: another process's files and counters."""
    try:
        async with asyncio.timeout(timeout):
            while not holds():
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise TimeoutError(f"not reached within {timeout} s: {what}") from None


class Stopwatch:
    """How long something took, for limits that are promised: they hold where the agent gets a CPU when it wants one.

    So what others took of the machine meanwhile does not count: the time for which anything here waited for a CPU
    (Documentation/accounting/psi.rst), and what the hypervisor withheld. A kernel that does not count it is taken to be
    idle.
    """

    def __init__(self) -> None:
        self._began, self._withheld = time.perf_counter(), _withheld()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.perf_counter() - self._began - (_withheld() - self._withheld)


def _withheld() -> float:
    """Seconds since the machine's start for which some CPU did not do what it was wanted for."""
    try:
        some = Path("/proc/pressure/cpu").read_text().partition("total=")[2].split()[0]
    except OSError:
        return 0.0
    stolen = Path("/proc/stat").read_text().split(maxsplit=9)[8]  # by all CPUs; the pressure is their mean
    return int(some) * (os.cpu_count() or 1) / 1e6 + int(stolen) / os.sysconf("SC_CLK_TCK")


async def finish(*arguments: str, environment: Mapping[str, str] = os.environ) -> tuple[int, str, str]:
    """Run a command to its end: exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        MAIN,
        *arguments,
        cwd=REPOSITORY,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


class AgentProcess:
    """`fairlead run`; killed when its context is left, whatever state it is in.

    Args:
        config: its configuration.
        prelude: Python that runs in the process before the command: a shorter delay, a namespace of its own.
        environment: what it has beyond this process's.
        wrapper: a command that runs it.
    """

    def __init__(
        self, config: Path, prelude: str = "", environment: Mapping[str, str] | None = None, wrapper: Sequence[str] = ()
    ) -> None:
        self.log: list[Line] = []
        self._command = [*wrapper, sys.executable, "-c", f"{prelude}\n{MAIN}", "run", "--config", str(config)]
        self._environment = {**os.environ, **(environment or {})}
        self._process: asyncio.subprocess.Process
        self._reader: asyncio.Task[None]
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            cwd=REPOSITORY,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.log.append({"event": "no-json", "text": line.decode(errors="replace")})
            self._news.set()

    # --- what it says ---

    def said(self, event: str, **fields: object) -> list[Line]:
        """The lines so far of this event, with these fields."""
        return [line for line in self.log if line["event"] == event and fields.items() <= line.items()]

    async def says(self, event: str, **fields: object) -> Line:
        """The first line of this event, waited for."""
        try:
            async with asyncio.timeout(PATIENCE):
                while not (lines := self.said(event, **fields)):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise TimeoutError(f"the agent never said {event} {fields or ''}; its log: {self.log}") from None
        return lines[0]

    # --- what it uses ---

    @property
    def pid(self) -> int:
        return self._process.pid

    def open_files(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/fd").iterdir())

    def threads(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.pid}/task").iterdir())

    def rss(self) -> int:
        """Resident memory in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def takes_turns(self, number: int) -> None:
        """Wait until it has slept and woken so many times: whatever it repeats has been repeated."""
        goal = self._switches() + number
        await until(lambda: self._switches() >= goal, f"{number} turns of the agent")

    def _switches(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    # --- its end ---

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def ended(self, timeout: float = PATIENCE) -> int:
        """Wait for its end; the exit code."""
        code = await asyncio.wait_for(self._process.wait(), timeout)
        await self._reader
        return code

    async def kill(self) -> None:
        """As `kill -9`; nothing if it has ended."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
        await self.ended()
