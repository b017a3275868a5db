"""Sets up Python's garbage collector for thousands of objects that live long."""

from __future__ import annotations

import gc
from typing import Final

_THRESHOLDS: Final = (700, 10, 10)
"""Those of Python 3.11 and 3.12. 3.13 begins at 2,000 and collects a third as often: what 200 restarts of a kubelet leave
lying took 10 MB instead of 3."""

_ENOUGH: Final = 100  # devices
_MANY: Final = 10_000  # objects; walking over them takes 3 ms

_made = 0


def settle() -> None:
    """To be called once everything is there that lives as long as the process.

    It is kept out of the collector's sight: walking its 50,000 objects would stop the loop for 20 ms now and then.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def made(devices: int) -> None:
    """So many devices have just been found or filed, with all that belongs to them: keep many objects out of sight.

    With 10,000 devices a walk over all objects takes 100 ms. What is made for some of them takes 3, and is not walked over
    again. It goes all the same once nothing refers to it; only cycles stay. Devices have none, but a connection of the
    kubelet's that was open at that moment has, and would stay when it ends: where few devices came and went all the time,
    the process grew by 1 MB a minute. So what is not much is left to the collector.
    """
    global _made  # noqa: PLW0603  # as the collector's own state
    _made += devices
    if _made < _ENOUGH:
        return
    _made = 0
    gc.collect()
    if len(gc.get_objects()) > _MANY:
        gc.freeze()
