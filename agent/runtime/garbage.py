"""Sets up Python's garbage collector for thousands of objects that live long."""

from __future__ import annotations

import gc
from typing import Final

_THRESHOLDS: Final = (700, 10, 10)
"""Those of Python 3.11 and 3.12. 3.13 begins at 2,000 and collects a third as often: what 200 restarts of a kubelet leave
lying took 10 MB instead of 3."""

_ENOUGH: Final = 1000  # devices; walking over all that belongs to them takes 10 ms


def put_off() -> None:
    """Collects nothing until `settle`: what imports make stays, and walking over it takes a tenth of the start."""
    gc.disable()


def settle() -> None:
    """To be called once everything is there that lives as long as the process.

    It is kept out of the collector's sight: walking its 50,000 objects would stop the loop for 20 ms now and then.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(*_THRESHOLDS)


class Pile:
    """Devices that are there, with all that belongs to them: of thousands, the collector sees the newest thousand.

    With 10,000 a walk over all objects takes 100 ms. They go all the same once nothing refers to them; only cycles stay.
    Devices have none, but a connection of the kubelet's that is open when the pile has grown has, and stays when it ends:
    where few devices come and go all the time, the process would grow by 1 MB a minute. So what has gone counts, too.
    Objects are not counted: `gc.get_objects` in a thread breaks a tuple that another one is making (SystemError, "bad
    argument to internal function").
    """

    def __init__(self) -> None:
        self._new = 0

    def grow(self, devices: int) -> None:
        """So many devices more; fewer, if negative."""
        self._new = max(0, self._new + devices)
        if self._new >= _ENOUGH:
            self._new = 0
            gc.collect()
            gc.freeze()
