"""How much something asks of the kernel: what its cost comes from, and the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

_NO_CALL: Final = {"fspath"}


def kernel_calls(function: Callable[[], object]) -> int:
    """The number of calls into the kernel for files and directories that this makes, in this thread."""
    count = 0

    def note(_frame: FrameType, event: str, called: object) -> None:
        nonlocal count
        if event == "c_call" and getattr(called, "__module__", None) in ("posix", "io", "_io"):
            count += getattr(called, "__name__", "") not in _NO_CALL

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
