from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.devices import state
from agent.devices.model import Held
from agent.devices.state import Kept, StateFile
from tests.devices.fakes import device, held

X = held("a.example/one", "x", device("card", hardware=["pci:1", "pci:2"], identity="serial 1"))
Y = held("a.example/one", "y")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the disk, however slow the machine is today."""
    monkeypatch.setattr(state, "_WRITE_PATIENCE", 10.0)


@pytest.mark.usefixtures("patient")
async def test_what_one_run_wrote_the_next_one_reads(tmp_path: Path) -> None:
    await StateFile(tmp_path / "made" / "here").write([X, Y])
    assert StateFile(tmp_path / "made" / "here").read() == Kept(claims=(X, Y))


def test_without_a_file_there_is_nothing_and_nothing_to_say(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert StateFile(tmp_path).read() == Kept()
    assert logs == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"version": 1, "claims": 7}', b'{"version": 2, "claims": []}', b"\xff\xfe", b'{"version": 1, "cla'],
)
def test_a_file_that_cannot_be_read_is_reported_and_nothing_is_known(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with capture_logs() as logs:
        assert StateFile(tmp_path).read() == Kept()
    assert [line["event"] for line in logs] == ["state-unreadable"]


def test_a_directory_that_is_none_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with capture_logs() as logs:
        assert StateFile(tmp_path / "file").read() == Kept()
    assert [line["event"] for line in logs] == ["state-unreadable"]


@pytest.mark.usefixtures("patient")
async def test_a_reader_sees_the_old_file_or_the_new_one_and_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_MOST_BYTES", 0)  # a fresh file every time
    it = StateFile(tmp_path)
    await it.write([X])
    seen: list[Kept] = []
    whole = Path.rename

    def rename(path: Path, target: Path) -> Path:
        seen.append(StateFile(tmp_path).read())
        return whole(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    await it.write([Y])
    assert seen == [Kept(claims=(X,))]
    assert it.read() == Kept(claims=(Y,))
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("left", [1, 20, 60])
async def test_a_line_that_was_cut_off_counts_for_nothing(tmp_path: Path, left: int) -> None:
    it = StateFile(tmp_path)
    await it.write([X])
    whole = (tmp_path / "state.json").read_bytes()
    await it.write([X, Y])
    content = (tmp_path / "state.json").read_bytes()
    assert content.startswith(whole)
    (tmp_path / "state.json").write_bytes(content[: len(whole) + left])
    assert StateFile(tmp_path).read() == Kept(claims=(X,))


@pytest.mark.usefixtures("patient")
async def test_the_file_is_added_to_until_it_is_long_and_then_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = StateFile(tmp_path)
    lines = []
    for _ in range(5):
        await it.write([X])
        lines.append((tmp_path / "state.json").read_bytes().count(b"\n"))
        size = (tmp_path / "state.json").stat().st_size // lines[-1]
        monkeypatch.setattr(state, "_MOST_BYTES", 3 * size)
    assert lines == [1, 2, 3, 1, 2]
    assert it.read() == Kept(claims=(X,))


@pytest.mark.usefixtures("patient")
async def test_a_file_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    it = StateFile(tmp_path)
    await it.write([X])
    (tmp_path / "state.json").unlink()
    await it.write([X, Y])
    assert it.read() == Kept(claims=(X, Y))


class Slow:
    """Holds every write up until it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.gate, self.written = threading.Event(), threading.Semaphore(0), list[bytes]()
        whole = StateFile._add

        def add(file: StateFile, line: bytes) -> None:
            self.entered.set()
            self.gate.acquire(timeout=10)
            self.written.append(line)
            whole(file, line)

        monkeypatch.setattr(StateFile, "_add", add)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(monkeypatch)
    yield made
    made.gate.release(9)


async def test_an_allocate_waits_for_a_slow_disk_only_as_long_as_its_patience(
    tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_WRITE_PATIENCE", 0.01)
    began = time.monotonic()
    await StateFile(tmp_path).write([X])
    assert time.monotonic() - began < 0.5
    assert slow.written == []


@pytest.mark.usefixtures("patient")
async def test_the_newest_content_is_written_and_what_came_between_is_not(tmp_path: Path, slow: Slow) -> None:
    it = StateFile(tmp_path)
    first = asyncio.create_task(it.write([X]))
    while not slow.entered.is_set():
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(it.write([held("a.example/one", f"x{n}")])) for n in range(20)]
    await asyncio.sleep(0)
    slow.gate.release()
    await first
    await asyncio.sleep(0)
    assert not any(write.done() for write in others)
    slow.gate.release()
    await asyncio.gather(*others)
    assert len(slow.written) == 2
    assert [claim.id for claim in it.read().claims] == ["x19"]


@pytest.mark.usefixtures("patient")
async def test_a_write_that_fails_is_reported_once_and_so_is_the_end_of_it(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    it = StateFile(tmp_path / "state")
    with capture_logs() as logs:
        for _ in range(3):
            await it.write([X])
        (tmp_path / "state").unlink()
        for _ in range(2):
            await it.write([X])
    assert [line["event"] for line in logs] == ["state-not-written", "state-written-again"]
    assert it.read() == Kept(claims=(X,))


@pytest.mark.usefixtures("patient")
async def test_what_cannot_be_written_down_is_reported_and_the_next_is(tmp_path: Path) -> None:
    it = StateFile(tmp_path)
    with capture_logs() as logs:
        await it.write([Held("a.example/one", "not text: \udcff", "fake")])
        await it.write([X])
    assert [line["event"] for line in logs] == ["state-not-written", "state-written-again"]


FULL_DISK = """
    import asyncio, resource, sys
    from pathlib import Path
    from agent.devices import state
    from agent.devices.model import Held

    async def run(directory):
        state._WRITE_PATIENCE = 10.0
        it = state.StateFile(directory)
        await it.write([Held("a.example/one", "old", "fake")])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        for _ in range(2):
            await it.write([Held("a.example/one", f"new{n}", "fake") for n in range(100)])

    asyncio.run(run(Path(sys.argv[1])))
"""


def test_on_a_full_disk_the_old_file_stays_whole_and_no_half_one_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.count("state-not-written") + done.stderr.count("state-not-written") == 1
    assert [claim.id for claim in StateFile(tmp_path).read().claims] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
