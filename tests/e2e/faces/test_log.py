"""The log never stops the daemon: not where nobody reads it, and not where a line cannot be made."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.node import UNHURRIED, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish
from tests.wait import until

UNREAD = """
import os
os.dup2(os.open({fifo!r}, os.O_WRONLY), 2)
from agent.runtime import logs
logs.QueuedLines.__init__.__defaults__ = (20,)
"""


class Pipe:
    """What the agent writes its log to; holds 4 KiB that nobody reads until somebody does."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, 4096)
        self.text = b""

    def read(self) -> list[dict[str, object]]:
        """All that has been written."""
        try:
            while data := os.read(self.end, 4096):
                self.text += data
        except BlockingIOError:
            pass
        return [json.loads(line) for line in self.text.splitlines(keepends=True) if line.endswith(b"\n")]


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    made = Pipe(tmp_path / "stderr")
    yield made
    os.close(made.end)


async def test_a_log_that_nobody_reads_stops_nothing_and_what_was_lost_is_counted(node: Node, pipe: Pipe) -> None:
    node.mknod("w1")
    config = node.config(chardev())
    async with AgentProcess(config, UNHURRIED + UNREAD.format(fifo=str(pipe.path))):
        await node.registered()
        await node.healthy("w1")
        for _ in range(30):  # each says more than the pipe has room for after the tenth
            node.mknod("w2")
            await node.healthy("w1", "w2")
            node.unlink("w2")
            await node.healthy("w1")
        assert (await node.admit(pod())).phase == "Running"
        status = json.loads((await finish("status", "--json", "--config", str(config)))[1])
        assert [it["subject"] for it in status["problems"]] == ["log"]
        doctor = json.loads((await finish("doctor", "--json", "--config", str(config)))[1])
        assert [it["level"] for it in doctor["findings"] if it["check"] == "log"] == [1]
        await until(lambda: any(line["event"] == "log-lines-lost" for line in pipe.read()), "what was lost is told")
        (told,) = (line for line in pipe.read() if line["event"] == "log-lines-lost")
        assert f"{told['count']} lines" in status["problems"][0]["message"]


async def test_a_log_that_nobody_reads_does_not_keep_the_daemon_from_its_end(node: Node, pipe: Pipe) -> None:
    node.mknod("w1")
    async with AgentProcess(node.config(chardev()), UNHURRIED + UNREAD.format(fifo=str(pipe.path))) as agent:
        await node.registered()
        for _ in range(15):
            node.mknod("w2")
            await node.healthy("w1", "w2")
            node.unlink("w2")
            await node.healthy("w1")
        agent.signal(signal.SIGTERM)
        assert await agent.ended() == 0


@pytest.mark.parametrize(
    "prelude",
    [
        "from agent.daemon.event_log import Events; Events.note = lambda *_: 1 / 0",
        "import msgspec; encode, msgspec.json.encode = msgspec.json.encode, lambda *_, **__: 1 / 0",
        "from agent.runtime import logs; logs.structlog.processors.TimeStamper.__call__ = lambda *_: 1 / 0",
    ],
    ids=["kept", "rendered", "dated"],
)
async def test_an_exception_inside_a_log_call_stops_nothing(node: Node, prelude: str) -> None:
    node.mknod("w1")
    async with AgentProcess(node.config(chardev()), f"{UNHURRIED}\n{prelude}\n") as agent:
        await node.registered()
        node.mknod("w2")
        await node.healthy("w1", "w2")
        assert (await node.admit(pod())).phase == "Running"
        agent.signal(signal.SIGTERM)
        assert await agent.ended() == 0
