"""A process that has imported the daemon and forks a child for each program: a start without 0.4 s of imports.

The child goes on as `python -c CODE ARGUMENTS...` does: its own PID, environment, streams, signals and exit. Each
pytest process has one such server; it ends, and kills its children, when that process ends.

A module's constants exist already when a program's code runs. So a prelude that changes a constant must name every
module that has imported it by name.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Final, Self

from tests.e2e import passing

REPOSITORY: Final = Path(__file__).parents[2]
_BYTES: Final = 128 << 10  # of one request, with its environment
_IMPORTED: Final = (
    *(
        f"agent.cli.{name}"
        for name in ("commands", "discover", "doctor", "events", "explain", "reload", "status", "validate")
    ),
    "agent.daemon.supervisor",
    *(
        f"backends.{name}"
        for name in ("cex", "chardev", "gpu", "infiniband", "mdev", "solarflare", "sriov", "stub", "vfio")
    ),
    "tests.e2e.inject",
)


@dataclass(frozen=True, slots=True)
class Program:
    """What a child runs."""

    code: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


class Child:
    """One child, for whoever asked for it."""

    def __init__(self, answers: socket.socket) -> None:
        self.pid = 0
        self._answers = answers
        self._end: asyncio.Task[int]

    @classmethod
    async def start(cls, program: Program, streams: tuple[int, int, int]) -> Self:
        """Fork it; `streams` are its stdin, stdout and stderr."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        request = json.dumps([program.code, program.arguments, dict(program.environment)]).encode()
        with theirs:
            socket.send_fds(_server(), [request], [theirs.fileno(), *streams])
        child = cls(ours)
        child.pid = await child._answer()
        child._end = asyncio.create_task(child._answer())
        return child

    async def _answer(self) -> int:
        said = await asyncio.get_running_loop().sock_recv(self._answers, 64)
        assert said, "the fork server has ended"
        return int(said)

    @property
    def returncode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._end.result() if self._end.done() else None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    async def wait(self) -> int:
        """Wait for its end; the `returncode`."""
        code = await asyncio.shield(self._end)
        self._answers.close()
        return code


# --- the server's owner ---

_running: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []
"""The connection to the server and its process, once somebody has started a child."""


def _server() -> socket.socket:
    """The connection to the server, which is started if it does not run."""
    if _running:
        return _running[0][0]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _BYTES)
    with theirs:
        command = [sys.executable, "-m", __name__, str(theirs.fileno())]
        server = subprocess.Popen(command, cwd=REPOSITORY, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    _running.append((ours, server))
    return ours


def stop() -> None:
    """End the server, if it runs."""
    while _running:
        ours, server = _running.pop()
        ours.close()
        server.wait()


# --- the server ---


@dataclass
class _Server:
    control: socket.socket
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    children: dict[int, tuple[int, socket.socket]] = field(default_factory=dict)  # pidfd → PID, who asked

    def run(self) -> Program:
        """Serve; returns in each child, what it runs."""
        self.selector.register(self.control, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is not self.control:
                    self._reap(key.fd)
                elif (program := self._fork()) is not None:
                    return program

    def _fork(self) -> Program | None:
        request, fds, _, _ = socket.recv_fds(self.control, _BYTES, 4)
        if not request:
            self._end()
        asker = socket.socket(fileno=fds[0])
        pid = os.fork()
        if pid == 0:
            self._leave(asker, fds[1:])
            return Program(*json.loads(request))
        for fd in fds[1:]:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self.children[pidfd] = pid, asker
        self.selector.register(pidfd, selectors.EVENT_READ)
        self._tell(asker, pid)
        return None

    def _leave(self, asker: socket.socket, streams: Sequence[int]) -> None:
        """In a child: keep nothing of the server's but the three streams."""
        asker.close()
        for pidfd, (_, other) in self.children.items():
            os.close(pidfd)
            other.close()
        self.selector.close()
        self.control.close()
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
        for fd in set(streams) - {0, 1, 2}:
            os.close(fd)

    def _reap(self, pidfd: int) -> None:
        pid, asker = self.children.pop(pidfd)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._tell(asker, os.waitstatus_to_exitcode(status))
        asker.close()

    def _tell(self, asker: socket.socket, number: int) -> None:
        with suppress(OSError):  # nobody waits for it
            asker.send(str(number).encode())

    def _end(self) -> None:
        for pid, _ in self.children.values():
            os.kill(pid, signal.SIGKILL)
        sys.exit()


def _program() -> str:
    """Serve; in a child: the code to run, once everything is as a fresh interpreter has it."""
    passing.install()
    for name in _IMPORTED:
        import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for pytest, which ends us
    program = _Server(socket.socket(fileno=int(sys.argv[1]))).run()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.argv = ["-c", *program.arguments]
    sys.path[1:1] = [path for path in program.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    return program.code


if __name__ == "__main__":
    exec(compile(_program(), "<string>", "exec"), {"__name__": "__main__"})
