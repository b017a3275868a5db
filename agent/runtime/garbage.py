"""Sets up Python's garbage collector for thousands of objects that live long, and the C library's heap for what does not."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from typing import Final

_THRESHOLDS: Final = (700, 10, 2)
"""The first two are those of Python 3.11 and 3.12; 3.13 begins at 2,000, and the garbage of 200 restarts of a kubelet took 10 MB
instead of 3. The third is 10 there: by then there are 77,000 objects of ended calls, which takes 60 ms; 14,000 take 10 ms."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGE: Final = 512 << 10
"""Bytes from which on a piece of memory is the kernel's own (mallopt(3)). asyncio takes 256 KiB each time that it receives: from
the kernel, or from a heap that gives them back each time, that takes 15 us more."""

ENOUGH: Final = 1000
"""New devices after which they are hidden from the collector: walking over all that belongs to them takes 10 ms."""


def use_one_heap() -> None:
    """Have glibc take the memory of all threads from one heap, and give back what is large as soon as it is free.

    It has a heap for each thread, up to eight a CPU, though the interpreter lets one thread run at a time; and once a large
    piece was freed, others as large come from the heap, where a small one above them keeps them (malloc/malloc.c,
    `mp_.no_dyn_threshold`). After 3,000 steps of the soak that was 2 of 61 MB. Other C libraries have neither.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)


def put_off() -> None:
    """Collect nothing until `settle`: what imports make stays, and walking over it takes a tenth of the start."""
    gc.disable()


def settle() -> None:
    """Hide all objects that exist now from the collector: walking over 50,000 of them stops the loop for 20 ms.

    It is called once everything exists that lives as long as the process.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(*_THRESHOLDS)


def hide() -> None:
    """Hide all objects that exist now from the collector; garbage is collected before."""
    gc.collect()
    gc.freeze()


class Pile:
    """Counts new devices, and hides each thousand of them from the collector: with 10,000 a walk takes 100 ms.

    Hidden objects are freed all the same once nothing refers to them, but for cycles. Devices have none. A connection of
    the kubelet's has, and stays in memory if it is open when the thousand is full: where few devices come and go all the
    time, the process would grow by 1 MB a minute. So devices that go count, too. Objects are not counted:
    `gc.get_objects` in a thread breaks a tuple that another thread is making (SystemError, "bad argument to internal
    function").
    """

    def __init__(self) -> None:
        self._new = 0

    def grow(self, devices: int) -> None:
        """Count so many devices more; fewer, if negative."""
        self._new = max(0, self._new + devices)
        if self._new >= ENOUGH:
            self._new = 0
            hide()
