"""Programs in processes of their own: `fairlead run`, whose log is read line by line, and every other command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from tests import nodes
from tests.e2e.forkserver import REPOSITORY, Child, Program
from tests.wait import limit, until

MAIN: Final = ("" if nodes.can_make_nodes() else nodes.PRELUDE) + "from agent.cli import main; main()"

Line = dict[str, Any]
T = TypeVar("T")


class Process:
    """A program; killed when its context is left, whatever state it is in.

    It is a child of the fork server. With a wrapper it is a fresh interpreter, as on a node.

    Args:
        arguments: those of `fairlead`, or of the code.
        code: Python that runs in the process.
        environment: what it has beyond this process's.
        wrapper: a command that runs the interpreter; `env` changes nothing.
        stdout: a file descriptor, if not a pipe to `stdout`.
    """

    def __init__(
        self,
        *arguments: str,
        code: str = MAIN,
        environment: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        stdout: int | None = None,
    ) -> None:
        self.stdin: asyncio.StreamWriter
        self.stdout: asyncio.StreamReader
        self.stderr: asyncio.StreamReader
        self._program = Program(code, arguments, {**os.environ, **(environment or {})})
        self._wrapper = wrapper
        self._stdout = stdout
        self._process: Child | asyncio.subprocess.Process
        self._transports: list[asyncio.BaseTransport] = []

    async def __aenter__(self) -> Self:
        (stdin, ours), (out, stdout), (err, stderr) = pipes = os.pipe(), os.pipe(), os.pipe()
        self.stdin = await self._writer(ours)
        self.stdout, self.stderr = await self._reader(out), await self._reader(err)
        try:
            await self._start(stdin, stdout if self._stdout is None else self._stdout, stderr)
        finally:
            for fd in (pipes[0][0], pipes[1][1], pipes[2][1]):
                os.close(fd)
        return self

    async def _start(self, stdin: int, stdout: int, stderr: int) -> None:
        if not self._wrapper:
            self._process = await Child.start(self._program, (stdin, stdout, stderr))
            return
        command = [*self._wrapper, sys.executable, "-c", self._program.code, *self._program.arguments]
        environment = self._program.environment
        self._process = await asyncio.create_subprocess_exec(
            *command, cwd=REPOSITORY, env=environment, stdin=stdin, stdout=stdout, stderr=stderr
        )

    async def _reader(self, fd: int) -> asyncio.StreamReader:
        reader = asyncio.StreamReader(limit=1 << 20)
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(fd, "rb", buffering=0))
        self._transports.append(transport)
        return reader

    async def _writer(self, fd: int) -> asyncio.StreamWriter:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(fd, "wb", buffering=0)
        )
        self._transports.append(transport)
        return asyncio.StreamWriter(transport, protocol, None, loop)

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
        for transport in self._transports:
            transport.close()

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
        await until(lambda: self._switches() >= goal, f"{number} turns of the process", seen=self._switches)

    def _switches(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    # --- its end ---

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        async with limit(f"the end of process {self.pid}"):
            return await self._process.wait()

    async def kill(self) -> None:
        """As `kill -9`; nothing if it has ended."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):  # it has just ended
                self._process.send_signal(signal.SIGKILL)
        await self.ended()

    async def finished(self) -> tuple[int, str, str]:
        """Wait for its end: exit code, and what it has said on stdout and stderr since somebody listened last."""
        async with limit(f"the end of {self._program.arguments}"):
            out, err = await asyncio.gather(self.stdout.read(), self.stderr.read())
        return await self.ended(), out.decode(), err.decode()


async def finish(*arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run a command to its end: exit code, stdout, stderr."""
    async with Process(*arguments, environment=environment) as process:
        return await process.finished()


class AgentProcess(Process):
    """`fairlead run`.

    Args:
        config: its configuration.
        prelude: Python that runs in the process before the command: a shorter delay, a namespace of its own.
        environment: what it has beyond this process's.
        wrapper: a command that runs it.
    """

    def __init__(
        self, config: Path, prelude: str = "", environment: Mapping[str, str] | None = None, wrapper: Sequence[str] = ()
    ) -> None:
        code = f"{prelude}\n{MAIN}"
        super().__init__("run", "--config", str(config), code=code, environment=environment, wrapper=wrapper)
        self.log: list[Line] = []
        self._log_reader: asyncio.Task[None]
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._log_reader = asyncio.create_task(self._read())
        self._log_reader.add_done_callback(lambda _: self._news.set())
        return self

    async def _read(self) -> None:
        async for line in self.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.log.append({"event": "no-json", "text": line.decode(errors="replace")})
            self._news.set()

    def said(self, event: str, **fields: object) -> list[Line]:
        """The lines so far of this event, with these fields."""
        return [line for line in self.log if line["event"] == event and fields.items() <= line.items()]

    async def says(self, event: str, *, times: int = 1, **fields: object) -> Line:
        """The first line of this event, or that of this number, waited for."""
        async with limit(f"a line {event} {fields or ''}", seen=lambda: self.log):
            while len(lines := self.said(event, **fields)) < times:
                assert not self._log_reader.done(), f"it has ended, and never said {event} {fields or ''}: {self.log}"
                self._news.clear()
                await self._news.wait()
        return lines[times - 1]

    async def out_of_time(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call that ends when its deadline has passed: on its clock seconds pass until then."""
        task = asyncio.create_task(call)

        def is_over() -> bool:
            if not task.done():
                self.signal(signal.SIGUSR1)
            return task.done()

        await until(is_over, "the end of a call whose deadline has passed", seen=lambda: self.log)
        return task.result()

    def pass_minute(self) -> None:
        """A minute passes at once on its clock: a claim may end now, and no deadline is missed."""
        self.signal(signal.SIGUSR2)

    async def ended(self) -> int:
        code = await super().ended()
        async with limit("the end of its log", seen=lambda: self.log):
            await self._log_reader
        return code
