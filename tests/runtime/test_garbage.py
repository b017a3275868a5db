from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from agent.runtime import process


class Knot:
    """Refers to itself, as a connection does."""

    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_collected_during_the_start_and_what_it_made_is_left_alone_on_every_python() -> None:
    before = gc.get_threshold()
    try:
        process.put_off_collecting()
        assert not gc.isenabled()
        process.settle()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == (700, 10, 2)
    finally:
        gc.enable()
        gc.unfreeze()
        gc.set_threshold(*before)


@pytest.fixture
def pile() -> Iterator[process.Pile]:
    yield process.Pile()
    gc.unfreeze()


def stays(knot: Callable[[], object], grown: Callable[[], None]) -> bool:
    """Whether an object with a cycle is there after its end, where so many devices came while it was alive."""
    connection = knot()
    grown()
    ended = weakref.ref(connection)
    del connection
    gc.collect()
    return ended() is not None


def test_what_ends_where_hundreds_of_devices_come_and_go_for_ever_is_collected(pile: process.Pile) -> None:
    def grown() -> None:
        for _ in range(100):
            pile.grow(900)
            pile.grow(-900)

    assert not stays(Knot, grown)


def test_what_thousands_of_devices_are_made_of_is_not_walked_over_again(pile: process.Pile) -> None:
    def grown() -> None:
        for _ in range(10):
            pile.grow(100)

    assert stays(Knot, grown)


def test_devices_that_a_thread_finds_spoil_nothing_that_the_loop_makes_meanwhile() -> None:
    """CPython lets `gc.get_objects` see a tuple that is being made, which cannot grow then."""
    is_over = threading.Event()

    def find() -> None:
        while not is_over.is_set():
            process.Pile().grow(1000)

    before, finder = sys.getswitchinterval(), threading.Thread(target=find)
    sys.setswitchinterval(1e-6)
    finder.start()
    try:
        for _ in range(10000):
            assert len(tuple(it for it in range(500))) == 500
    finally:
        sys.setswitchinterval(before)
        is_over.set()
        finder.join()
        gc.unfreeze()


THREADS = """
import ctypes, sys, threading
from agent.runtime import process
process.use_one_heap()
threads = [threading.Thread(target=lambda: held.append(bytes(5000))) for _ in range(8)]
held = []
for it in threads: it.start()
for it in threads: it.join()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
"""


def test_the_memory_of_all_threads_comes_from_one_heap() -> None:
    told = subprocess.run([sys.executable, "-c", THREADS], check=True, capture_output=True, text=True).stdout
    assert told.count("<heap nr=") == 1
