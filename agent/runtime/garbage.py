"""Sets up Python's garbage collector for thousands of objects that live long."""

from __future__ import annotations

import gc
import time
from typing import Final

_THRESHOLDS: Final = (700, 10, 10)
"""Those of Python 3.11 and 3.12. 3.13 begins at 2,000 and collects a third as often: what 200 restarts of a kubelet leave
lying took 10 MB instead of 3."""

_ENOUGH: Final = 1000  # devices within _TOGETHER; walking over all that belongs to them takes 10 ms
_TOGETHER: Final = 60.0  # seconds

_made = 0
_since = -_TOGETHER  # when the first of them was made; monotonic seconds


def settle() -> None:
    """To be called once everything is there that lives as long as the process.

    It is kept out of the collector's sight: walking its 50,000 objects would stop the loop for 20 ms now and then.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def made(devices: int) -> None:
    """So many devices have just been found or filed, with all that belongs to them: keep thousands out of its sight.

    With 10,000 devices a walk over all objects takes 100 ms. They go all the same once nothing refers to them; only cycles
    stay. Devices have none, but a connection of the kubelet's that was open at that moment has, and would stay when it
    ends: where few devices came and went all the time, the process grew by 1 MB a minute. So those are left to the
    collector. Objects are not counted: `gc.get_objects` in a thread breaks a tuple that another one is making
    (SystemError, "bad argument to internal function").
    """
    global _made, _since  # noqa: PLW0603  # as the collector's own state
    if (now := time.monotonic()) - _since >= _TOGETHER:
        _made, _since = 0, now
    _made += devices
    if _made >= _ENOUGH:
        _made = 0
        gc.collect()
        gc.freeze()
