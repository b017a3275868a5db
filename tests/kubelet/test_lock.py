from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.kubelet import lock
from agent.kubelet.lock import exclusive
from tests.wait import limit, until

HOLDER = """
import asyncio, sys
from pathlib import Path
from agent.kubelet.lock import exclusive
async def hold():
    async with exclusive(Path(sys.argv[1]), print):
        print("held", flush=True)
        await asyncio.Event().wait()
asyncio.run(hold())
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


async def test_one_holder_after_the_other(tmp_path: Path) -> None:
    for _ in range(2):
        async with exclusive(tmp_path / "lock", print) as held:
            assert not held.waited
            assert (tmp_path / "lock").read_text() == str(os.getpid())


async def test_a_second_holder_waits_says_so_once_and_takes_over_when_the_first_is_killed(
    tmp_path: Path, holder: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, try_ = list[bool](), lock._try_lock

    def tried(fd: int) -> bool:
        tries.append(try_(fd))
        return tries[-1]

    monkeypatch.setattr(lock, "_RETRY", 0.0)
    monkeypatch.setattr(lock, "_try_lock", tried)
    taken, done = asyncio.Event(), asyncio.Event()
    owners: list[str] = []

    async def take() -> None:
        async with exclusive(tmp_path / "lock", owners.append) as held:
            assert held.waited
            taken.set()
            await done.wait()

    second = asyncio.ensure_future(take())
    await until(lambda: len(tries) > 3, "it tries again and again")
    assert not taken.is_set()
    holder.kill()
    async with limit("the lock is taken over"):
        await taken.wait()
    assert owners == [str(holder.pid)]
    assert tries[-2:] == [False, True]
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    done.set()
    await second


async def test_a_lock_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        async with exclusive(tmp_path / "missing" / "lock", print):
            pass


async def test_what_a_longer_pid_left_in_the_file_is_gone(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("123456789012")
    async with exclusive(tmp_path / "lock", print):
        assert (tmp_path / "lock").read_text() == str(os.getpid())
