"""The plugin's own process: its start, its end, what it uses; where its paths are fixed, in a mount namespace of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, Protocol

from agent.simulation.conformance.timeline import Used

KUBELET: Final = Path("/var/lib/kubelet")
"""Where every device plugin looks for the kubelet, unless it is told otherwise."""

_TAIL: Final = 8192  # bytes of its output that are searched for its last words
_CUT: Final = 200  # characters of them
_ERROR: Final = re.compile(r"(\w*error|panic|fatal)\b[^:]*: ", re.IGNORECASE)
_NAMESPACE: Final = str(Path(__file__).with_name("namespace.py"))


class Plugin(Protocol):
    """A process of a plugin."""

    async def start(self) -> None:
        """Start it.

        Raises:
            OSError: it cannot be started.
        """

    def signal(self, number: int) -> None:
        """Send it a signal; nothing if it has ended."""

    async def ended(self) -> int:
        """Wait for its end; the exit code, which is below 0 for a signal."""

    def last_words(self) -> str:
        """What it printed last, in one line; nothing if that is not known."""

    def usage(self, label: str, at: float) -> Used | None:
        """What it has used; None where that cannot be read."""

    async def close(self) -> None:
        """End it, and what it has started, for good."""


class Command:
    """A plugin as its author starts it; its output goes to `log`.

    Args:
        command: program and arguments.
        root: the directory that it sees as /var/lib/kubelet; None where it knows its directory by itself.
        log: takes what it writes, that of others beside it.
    """

    def __init__(self, command: Sequence[str], root: Path | None, log: IO[bytes]) -> None:
        inside = [sys.executable, _NAMESPACE, str(KUBELET), str(root)] if root is not None else []
        self._command = [*inside, *command]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._from = 0  # where its part of the log begins

    async def start(self) -> None:
        """Start it in a session of its own, so that whatever it starts can be ended."""
        self._from = os.fstat(self._log.fileno()).st_size
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def signal(self, number: int) -> None:
        """Send it to the process, and SIGKILL to all that it has started."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            else:
                self._process.send_signal(number)

    async def ended(self) -> int:
        """Wait for its end."""
        assert self._process is not None, "it was started"
        return await self._process.wait()

    def last_words(self) -> str:
        """The last line that begins with an error (Node prints its version behind one), else the last of all."""
        size = os.fstat(self._log.fileno()).st_size
        start = max(self._from, size - _TAIL)
        printed = os.pread(self._log.fileno(), size - start, start).decode(errors="replace")
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        return next((line for line in reversed(lines) if _ERROR.match(line)), "".join(lines[-1:]))[:_CUT]

    def usage(self, label: str, at: float) -> Used | None:
        """As `used_by` reads it."""
        assert self._process is not None, "it was started"
        return used_by(self._process.pid, label, at)

    async def close(self) -> None:
        """Kill its session."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):  # nothing of it is left
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()


def used_by(pid: int, label: str, at: float) -> Used | None:
    """What a process has used (proc_pid_stat(5): utime and stime are the 14th and 15th field); None if it is gone."""
    process = Path(f"/proc/{pid}")
    try:
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        memory = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        files = sum(1 for _ in (process / "fd").iterdir())
    except (OSError, IndexError):
        return None
    return Used(at, label, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), memory, files)
