"""What something costs, and how fast the machine is meanwhile: a busy one is slower, in whatever it does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def cost(call: Callable[[], object]) -> float:
    """Seconds of a core's time that this takes."""
    began = time.thread_time()
    call()
    return time.thread_time() - began


def cost_of_reading(file: Path) -> float:
    """The same for one small file, on an average of 100 times."""

    def read_it() -> None:
        for _ in range(100):
            opened = os.open(file, os.O_RDONLY)
            try:
                os.read(opened, 4096)
            finally:
                os.close(opened)

    return cost(read_it) / 100
