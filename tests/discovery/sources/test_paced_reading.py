from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.discovery import sources
from agent.discovery.sources import AT_ONCE, read_in_turns, unwatched
from tests.wait import pass_time, settled, until

TURN = 1e6  # seconds that do not pass by themselves


class Pipe:
    """What is written into it, as it was read."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.most = 100
        self._out, self._in = os.pipe2(os.O_NONBLOCK)

    def write(self, data: bytes) -> None:
        os.write(self._in, data)

    def receive(self) -> bool:
        self.reads.append(os.read(self._out, self.most))
        if self.reads[-1] == b"!":
            raise ValueError("that is nonsense")
        return len(self.reads[-1]) == self.most

    @asynccontextmanager
    async def read(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(read_in_turns(self._out, self.receive, unwatched))
        await asyncio.sleep(0)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])
            os.close(self._out)
            os.close(self._in)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Pipe:
    monkeypatch.setattr(sources, "TURN", TURN)
    return Pipe()


async def test_what_comes_is_read_at_once_and_together_while_more_keeps_coming(pipe: Pipe) -> None:
    async with pipe.read():
        for n in range(AT_ONCE):
            pipe.write(b"%d" % n)
            await until(lambda n=n: len(pipe.reads) == n + 1)  # type: ignore[misc]
        for turn in range(3):
            for each in (b"a", b"b", b"c"):
                pipe.write(each)
                await settled()
            assert len(pipe.reads) == AT_ONCE + turn
            pass_time(TURN)
            await until(lambda turn=turn: len(pipe.reads) == AT_ONCE + turn + 1)  # type: ignore[misc]
            assert pipe.reads[-1] == b"abc"


async def test_what_waits_already_is_read_without_a_pause(pipe: Pipe) -> None:
    pipe.most = 1
    async with pipe.read():
        pipe.write(b"x" * 1000)
        await until(lambda: len(pipe.reads) == 1000)


async def test_a_source_that_fails_ends_also_between_two_turns(pipe: Pipe) -> None:
    async with pipe.read() as task:
        pipe.write(b"!")
        with pytest.raises(ValueError, match="nonsense"):
            await task
    assert pipe.reads == [b"!"]
