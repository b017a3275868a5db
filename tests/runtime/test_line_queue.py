from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator

import pytest

from agent.runtime.logs import QueuedLines
from tests.wait import block_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def test_lines_come_in_their_order_and_the_end_waits_for_them(pipe: tuple[int, int]) -> None:
    lines = QueuedLines(pipe[1])
    for number in range(100):
        lines.write(f"{number}\n")
    lines.close(60.0)
    assert os.read(pipe[0], 4096).split() == [str(number).encode() for number in range(100)]
    assert (lines.lost, lines.fileno(), lines.isatty()) == (0, pipe[1], False)


@pytest.mark.parametrize("blocking", [True, False])
def test_what_finds_no_room_is_counted_and_told_once_there_is(pipe: tuple[int, int], *, blocking: bool) -> None:
    os.set_blocking(pipe[1], blocking)
    lines, told = QueuedLines(pipe[1], limit=4), list[int]()
    lines.when_room = told.append
    for _ in range(10):
        lines.write("x" * 4095 + "\n")
    lines.close(0.0)  # which waits no longer than it may
    assert 4 <= lines.lost <= 6  # of the others one fills the pipe, one may be on its way
    while not told:
        os.read(pipe[0], 4096)
    block_until(lambda: sum(told) == lines.lost)


def test_a_stream_that_is_closed_loses_lines_and_raises_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    lines = QueuedLines(write)
    lines.write("nobody\n")
    lines.close(60.0)
    os.close(write)
    assert lines.lost == 1


def test_a_system_without_a_thread_to_spare_loses_lines_until_it_has_one(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    lines = QueuedLines(pipe[1])
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        lines.write("one\n")
    lines.write("two\n")
    lines.close(60.0)
    assert (os.read(pipe[0], 4096), lines.lost) == (b"two\n", 1)
