from __future__ import annotations

import asyncio
import errno
import gc
import os
import random
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from agent.claims.ledger import HeldThen, Ledger
from agent.daemon import state_file
from agent.daemon.state_file import Kept, StateFile
from agent.health import Drain, Handled, KeptHealth
from agent.health.causes import Active, Latch, Sighting
from agent.health.drains import Quarantine
from agent.model import Held
from backends.base import Clears, Seconds, Signal, Verdict
from tests.fakes import device, held
from tests.wait import PATIENCE, limit, pass_time, until

X = held("a.example/one", "x", device("card", hardware=["pci:1", "pci:2"], identity="serial 1"))
Y = held("a.example/one", "y")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the disk, however slow the machine is today."""
    monkeypatch.setattr(state_file, "_WRITE_PATIENCE", PATIENCE)


async def test_what_one_run_wrote_the_next_one_reads(tmp_path: Path) -> None:
    await StateFile(tmp_path / "made" / "here").write([X, Y])
    assert StateFile(tmp_path / "made" / "here").read() == Kept(claims=(X, Y))


async def test_a_new_claim_is_written_without_a_look_at_the_others(tmp_path: Path) -> None:
    ledger, state = Ledger(), StateFile(tmp_path)
    ledger.allocate([X], 0.0)
    await state.write(ledger.held_now())
    with pytest.MonkeyPatch.context() as unlooked:
        unlooked.setattr(HeldThen, "__iter__", None)
        ledger.allocate([Y], 1.0)
        assert await state.write(ledger.held_now())
    (line,) = (tmp_path / "state.json").read_text().splitlines()[1:]
    assert '"id":"x"' not in line
    assert StateFile(tmp_path).read() == Kept(claims=(X, Y))
    ledger.allocate([held("a.example/one", "x")], 2.0)
    await state.write(ledger.held_now())
    assert set(StateFile(tmp_path).read().claims or ()) == {held("a.example/one", "x"), Y}


async def test_what_was_not_undone_is_kept_and_a_state_from_before_that_is_read(tmp_path: Path) -> None:
    await StateFile(tmp_path).write([X], [Y])
    assert StateFile(tmp_path).read() == Kept(claims=(X,), releasing=(Y,))
    (tmp_path / "state.json").write_text(
        '{"version": 1, "claims": [{"resource": "a/b", "id": "x", "backend": "fake"}]}'
    )
    assert StateFile(tmp_path).read() == Kept(claims=(Held("a/b", "x", "fake"),))


def test_without_a_file_there_is_nothing_and_nothing_to_say(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert StateFile(tmp_path).read() == Kept()
    assert logs == []


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"version": 1, "claims": 7}', b'{"version": 99, "claims": []}', b"\xff\xfe", b'{"version": 1, "cla'],
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


async def test_a_reader_sees_the_old_file_or_the_new_one_and_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "_MOST_BYTES", 0)  # a fresh file every time
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


async def test_a_line_that_was_cut_off_counts_for_nothing_wherever_it_was(tmp_path: Path) -> None:
    it = StateFile(tmp_path)
    await it.write([X])
    whole = (tmp_path / "state.json").read_bytes()
    await it.write([X, Y], [Y], health=HEALTH)
    content = (tmp_path / "state.json").read_bytes()
    assert content.startswith(whole)
    ends = [at for at, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == 4
    for length in range(len(whole), len(content) + 1):
        lines = sum(end <= length for end in ends)  # the last one may lack its end
        assert state_file._contents(content[:length])[0] == Kept(
            claims=(X, Y) if lines > 1 else (X,),
            releasing=(Y,) if lines > 2 else None,
            health=HEALTH if lines > 3 else None,
        )


async def test_what_follows_a_line_that_was_cut_off_is_whole(tmp_path: Path) -> None:
    await StateFile(tmp_path).write([X], health=HEALTH)
    content = (tmp_path / "state.json").read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "state.json").write_bytes(content[:length])
        with capture_logs():
            it = StateFile(tmp_path)
            before = it.read()
            it._save(structs.replace(it._content, claims=(X, Y)))  # as its thread does
        assert StateFile(tmp_path).read() == Kept(claims=(X, Y), health=before.health)


async def test_the_file_is_added_to_until_it_has_doubled_and_then_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "_MOST_BYTES", 0)
    it, many = StateFile(tmp_path), [held("a.example/one", f"x{n}") for n in range(9)]
    lines = []
    for n in range(20):
        await it.write([*many, *[Y] * (n % 2)])
        lines.append((tmp_path / "state.json").read_bytes().count(b"\n"))
        assert StateFile(tmp_path).read() == Kept(claims=(*many, *[Y] * (n % 2)))
    assert lines[:3] == [1, 2, 3]
    assert lines.count(1) > 1


def random_claims(dice: random.Random, before: Sequence[Held]) -> list[Held]:
    after = [claim for claim in before if dice.random() < 0.9]
    return [*after, *(held("a.example/one", f"{dice.random()}") for _ in range(dice.randrange(4)))]


async def test_whatever_came_and_went_is_read_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "_MOST_BYTES", 8192)
    dice, it = random.Random(1), StateFile(tmp_path)
    claims, releasing = list[Held](), list[Held]()
    for _ in range(300):
        claims, releasing = random_claims(dice, claims), random_claims(dice, releasing)
        await it.write(claims, releasing)
        assert StateFile(tmp_path).read() == Kept(claims=tuple(claims), releasing=tuple(releasing))


async def test_what_an_allocate_writes_does_not_grow_with_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over many of them it is a few times their own size, with every file that is begun anew."""
    written, write = 0, os.write

    def counted(file: int, data: bytes) -> int:
        nonlocal written
        written += len(data)
        return write(file, data)

    monkeypatch.setattr(state_file, "_MOST_BYTES", 0)
    monkeypatch.setattr(os, "write", counted)
    claims = [held("a.example/one", f"id-{n:06}") for n in range(800)]
    it = StateFile(tmp_path)
    await it.write(claims)
    whole = (tmp_path / "state.json").stat().st_size
    written = 0
    for n in range(800):
        claims = [*claims[1:], held("a.example/one", f"id-{n + 800:06}")]
        await it.write(claims)
    assert written < 6 * whole
    assert StateFile(tmp_path).read() == Kept(claims=tuple(claims))


async def test_a_file_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    it = StateFile(tmp_path)
    await it.write([X])
    (tmp_path / "state.json").unlink()
    await it.write([X, Y])
    assert it.read() == Kept(claims=(X, Y))


class Slow:
    """Holds every write below a directory up until it is let through; a thread of an earlier test may still try again."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.gate, self.written = threading.Event(), threading.Semaphore(0), list[bytes]()
        append = StateFile._append

        def held_back(file: StateFile, lines: bytes) -> bool:
            if file.path.is_relative_to(directory):
                self.entered.set()
                self.gate.acquire(timeout=PATIENCE)
                self.written.append(lines)
            return append(file, lines)

        monkeypatch.setattr(StateFile, "_append", held_back)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow(tmp_path, monkeypatch)
    yield made
    made.gate.release(9)


async def test_an_allocate_waits_for_a_slow_disk_only_as_long_as_its_patience(tmp_path: Path, slow: Slow) -> None:
    allocate = asyncio.create_task(StateFile(tmp_path).write([X]))
    await until(slow.entered.is_set)
    assert not allocate.done()
    pass_time(state_file._WRITE_PATIENCE)
    async with limit("its patience ends"):
        await allocate
    assert slow.written == []


async def test_writes_that_nobody_waits_for_any_more_leave_nothing_behind(
    tmp_path: Path, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may hang for days, and pods come all the time."""
    monkeypatch.setattr(state_file, "_WRITE_PATIENCE", 0.0)
    it = StateFile(tmp_path)

    async def futures_after(writes: int) -> int:
        for n in range(writes):
            await it.write([held("a.example/one", f"x{n}")])
        gc.collect()
        return sum(isinstance(it, asyncio.Future) for it in gc.get_objects())

    assert await futures_after(1) >= await futures_after(20)


async def test_the_newest_content_is_written_and_what_came_between_is_not(tmp_path: Path, slow: Slow) -> None:
    it = StateFile(tmp_path)
    first = asyncio.create_task(it.write([X]))
    await until(slow.entered.is_set)
    others = [asyncio.create_task(it.write([held("a.example/one", f"x{n}")])) for n in range(20)]
    await asyncio.sleep(0)
    slow.gate.release()
    await first
    await asyncio.sleep(0)
    assert not any(write.done() for write in others)
    slow.gate.release()
    await asyncio.gather(*others)
    assert len(slow.written) == 2
    assert [claim.id for claim in it.read().claims or ()] == ["x19"]


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


async def test_what_could_not_be_written_is_tried_again_though_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a drain that was ordered while the disk was full would be forgotten with the next restart."""
    monkeypatch.setattr(state_file, "_RETRY", 0.01)
    (tmp_path / "state").touch()
    it = StateFile(tmp_path / "state")
    with capture_logs() as logs:
        await it.write(health=HEALTH)
        (tmp_path / "state").unlink()
        await until(lambda: len(logs) == 2)
    assert [line["event"] for line in logs] == ["state-not-written", "state-written-again"]
    assert StateFile(tmp_path / "state").read() == Kept(health=HEALTH)


async def test_what_ends_while_the_second_file_cannot_be_written_is_not_in_the_first_either(tmp_path: Path) -> None:
    file, second = StateFile(tmp_path), tmp_path / "state.health.json"
    await file.write([Y])
    second.mkdir()
    assert not await file.write([X, Y], health=KeptHealth(boot="b"))
    assert not await file.write([Y])
    second.rmdir()
    assert await file.write([Y])
    assert StateFile(tmp_path).read() == Kept(claims=(Y,), health=KeptHealth(boot="b"))
    assert second.exists()


async def test_what_a_failed_write_left_is_written_over_though_all_is_as_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "_MOST_BYTES", 0)  # a fresh file every time
    file, sync = StateFile(tmp_path), os.fsync
    await file.write([Y])

    def of_files(opened: int) -> None:  # as a disk fails once the new file is in the place of the old
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        sync(opened)

    with monkeypatch.context() as failing:
        failing.setattr(os, "fsync", of_files)
        assert not await file.write([X, Y])
    assert StateFile(tmp_path).read() == Kept(claims=(X, Y))
    assert await file.write([Y])
    assert StateFile(tmp_path).read() == Kept(claims=(Y,))


async def test_a_system_without_a_thread_to_spare_is_reported_and_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    it = StateFile(tmp_path)
    with capture_logs() as logs:
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", refuse)
            await it.write([X])
        await it.write(health=HEALTH)
    assert [(line["event"], line.get("reason")) for line in logs] == [
        ("state-not-written", "can't start new thread"),
        ("state-written-again", None),
    ]
    assert StateFile(tmp_path).read() == Kept(claims=(X,), health=HEALTH)


async def test_what_cannot_be_written_down_is_reported_and_the_next_is(tmp_path: Path) -> None:
    it = StateFile(tmp_path)
    with capture_logs() as logs:
        await it.write([Held("a.example/one", "not text: \udcff", "fake")])
        await it.write([X])
    assert [line["event"] for line in logs] == ["state-not-written", "state-written-again"]


# --- parts ---

HEALTH = KeptHealth(
    boot="boot 1",
    drains=(Drain("pci:1", "the fan", 1.0, 2.5),),
    latches=(
        Latch(
            Signal("pci:2", "xid-79", Verdict.NOW, "XID 79", clears_on=frozenset({Clears.BOOT, Clears.REBIND})),
            5.0,
            "kmsg",
            "boot 1",
            77,
            {"gpu": "nvidia 4711"},
        ),
    ),
    sightings=(
        Sighting(
            "infiniband",
            "mlx5_0",
            Active(Signal("pci:4", "port-down", Verdict.DELAYED, "", after=Seconds(10), recover_after=Seconds(5)), 3.0),
        ),
    ),
    quarantines=(Quarantine("pci:3", 2, 7.0, 127.0, "it became Unhealthy 5 times"),),
    handled={"kmsg": Handled("boot 1", 77)},
)


async def test_claims_and_health_are_written_apart_and_read_together(tmp_path: Path) -> None:
    it = StateFile(tmp_path)
    await it.write([X])
    await it.write(health=HEALTH)
    await it.write([X, Y])
    first, second, third = (tmp_path / "state.json").read_text().splitlines()
    assert ("claims" in first, "health" in first) == (True, False)
    assert ("claims" in second, "health" in second) == (False, True)
    assert ("claims" in third, "health" in third) == (True, False)
    assert StateFile(tmp_path).read() == Kept(claims=(X, Y), health=HEALTH)


async def test_a_fresh_file_has_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "_MOST_BYTES", 0)
    it = StateFile(tmp_path)
    await it.write(health=HEALTH)
    await it.write([X])
    assert StateFile(tmp_path).read() == Kept(claims=(X,), health=HEALTH)


async def test_the_next_run_keeps_the_part_that_it_does_not_write(tmp_path: Path) -> None:
    await StateFile(tmp_path).write([X], health=HEALTH)
    after = StateFile(tmp_path)
    after.read()
    await after.write([Y])
    assert StateFile(tmp_path).read() == Kept(claims=(Y,), health=HEALTH)


async def test_a_file_of_the_first_format_is_read_and_goes_on_in_the_second(tmp_path: Path) -> None:
    old = (
        b'{"version":1,"claims":[{"resource":"a.example/one","id":"y","backend":"fake","hardware":[],"identity":""}]}\n'
    )
    (tmp_path / "state.json").write_bytes(old * 2)
    it = StateFile(tmp_path)
    assert it.read() == Kept(claims=(Y,))
    await it.write(health=HEALTH)
    assert StateFile(tmp_path).read() == Kept(claims=(Y,), health=HEALTH)


async def test_a_part_that_cannot_be_written_is_not_forgotten_with_the_next(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    it = StateFile(tmp_path / "state")
    with capture_logs():
        await it.write(health=HEALTH)
        (tmp_path / "state").unlink()
        await it.write([X])
    assert StateFile(tmp_path / "state").read() == Kept(claims=(X,), health=HEALTH)


async def test_a_line_that_was_torn_in_the_middle_of_the_file_hides_no_other(tmp_path: Path) -> None:
    it = StateFile(tmp_path)
    await it.write(health=HEALTH)
    with (tmp_path / "state.json").open("ab") as file:
        file.write(b'{"claims":[{"reso\n')
    await it.write([X])
    assert StateFile(tmp_path).read() == Kept(claims=(X,), health=HEALTH)


FULL_DISK = """
    import asyncio, resource, sys
    from pathlib import Path
    from agent.daemon import state_file
    from agent.model import Held

    async def run(directory):
        state_file._WRITE_PATIENCE = 1e6
        it = state_file.StateFile(directory)
        await it.write([Held("a.example/one", "old", "fake")])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        for _ in range(2):
            await it.write([Held("a.example/one", f"new{n}", "fake") for n in range(100)])

    asyncio.run(run(Path(sys.argv[1])))
"""


def test_on_a_full_disk_the_old_file_stays_whole_and_no_half_one_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FULL_DISK), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.count("state-not-written") + done.stderr.count("state-not-written") == 1
    assert [claim.id for claim in StateFile(tmp_path).read().claims or ()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
