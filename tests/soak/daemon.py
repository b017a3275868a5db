"""The daemon's process as the soak sees it: its log, orders to it, the steps of its loop, what it takes of the machine."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.e2e.process import AgentProcess, Line
from tests.soak import inside
from tests.wait import until

TUNED: Final = """
from agent.claims import ledger
from agent.health import drains
from agent.kubelet import pod_claims
drains.FAILURES = 10**9
ledger.MIN_AGE, ledger.REWRITE_AFTER, pod_claims.IDLE = 3.0, 0.5, 2.0
"""
"""Half an hour is to hold as much as a day: claims end after seconds instead of minutes. And no quarantine: everything
here fails more often than any hardware may."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What the process takes."""

    at: float
    rss: int
    """Bytes."""
    files: int
    threads: int


class Daemon(AgentProcess):
    """`fairlead run` as a fresh interpreter, whose memory is its own.

    Args:
        config: its configuration.
        place: a directory for orders and answers.
        told: called with each line of its log.
        stepped: called with each long step of its loop: the CPU time, the wall's time, the name.
        prelude: more Python that runs in it before the command.
    """

    def __init__(
        self,
        config: Path,
        place: Path,
        environment: Mapping[str, str],
        told: Callable[[Line], None],
        stepped: Callable[[float, float, str], None],
        prelude: str = "",
    ) -> None:
        code = "\n".join([inside.prepare(place), TUNED, prelude])
        super().__init__(config, code, environment, wrapper=["env"])
        place.mkdir()
        self._orders, self._answers = place / "orders", place / "answers"
        self._told, self._stepped = told, stepped
        self._numbers = itertools.count(1)
        self._ordering = asyncio.Lock()
        self._answered: dict[int, Any] = {}
        self._read_to = 0

    async def _read(self) -> None:
        async for line in self.stderr:
            try:
                self._told(json.loads(line))
            except ValueError:
                self._told({"event": "no-json", "text": line.decode(errors="replace")})

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def order(self, call: str) -> Any:
        """Have the process call a function of tests.soak.inside; its answer."""
        async with self._ordering:
            number = next(self._numbers)
            self._orders.write_text(f"{number} {call}")
            self.signal(signal.SIGUSR1)
            await until(lambda: number in self.listen() or not self.runs, call)
            return self._answered.pop(number, None)

    def listen(self) -> Mapping[int, Any]:
        """Read what it has said so far; the answers that nobody has had yet."""
        data = b""
        if self._answers.exists():
            with self._answers.open("rb") as file:
                file.seek(self._read_to)
                data = file.read()
        for line in _whole(data):
            self._read_to += len(line)
            words = json.loads(line)
            if "order" in words:
                self._answered[words["order"]] = words["answer"]
            else:
                self._stepped(words["step"], words["wall"], words["name"])
        return self._answered

    def starve(self) -> None:
        """Let it open nothing more."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (1, hard))

    def feed(self) -> None:
        """Let it open files again."""
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (hard, hard))

    def sample(self, at: float) -> Sample:
        """What it takes now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return Sample(at, pages * os.sysconf("SC_PAGE_SIZE"), self.open_files(), self.threads())


def _whole(data: bytes) -> Iterator[bytes]:
    return (line for line in data.splitlines(keepends=True) if line.endswith(b"\n"))
