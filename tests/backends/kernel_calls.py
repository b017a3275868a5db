"""How much something asks of the kernel: what its cost comes from, and the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

_NO_CALL: Final = ("fspath", "_path_")  # beginnings of names; how often these run differs between Pythons


def kernel_calls(function: Callable[[], object]) -> int:
    """The number of calls into the kernel for files and directories that this makes, in this thread."""
    count = 0

    def note(_frame: FrameType, event: str, called: object) -> None:
        nonlocal count
        if event == "c_call" and getattr(called, "__module__", None) in ("posix", "io", "_io"):
            count += not getattr(called, "__name__", "").startswith(_NO_CALL)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
