"""Counts work: the byte-codes that a call runs in this thread, the same on any machine at any load."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def work(call: Callable[[], object]) -> int:
    """The byte-codes that the call runs, in all functions; what C does in one of them counts once."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def growth(prepare: Callable[[int], Callable[[], object]], size: int) -> float:
    """How many times the work grows where the size grows four times: 4 if each thing costs the same, 16 if each meets all.

    Args:
        prepare: makes what is needed for a size, which is not counted, and returns the call that is.
        size: the smaller one.
    """
    large, small = prepare(4 * size), prepare(size)
    gc.collect()
    gc.disable()  # else what an earlier test left behind may be finalized in the call, and count
    try:
        return work(large) / work(small)
    finally:
        gc.enable()
