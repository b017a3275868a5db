"""How Python's garbage collector is set in the daemon."""

from __future__ import annotations

import gc
from typing import Final

_THRESHOLDS: Final = (700, 10, 10)
"""Those of Python 3.11 and 3.12. 3.13 begins at 2,000 and collects a third as often: what 200 restarts of a kubelet leave
lying took 10 MB instead of 3."""


def settle() -> None:
    """To be called once everything is there that lives as long as the process.

    It is kept out of the collector's sight: walking its 50,000 objects would stop the loop for 20 ms now and then.
    """
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def keep() -> None:
    """The same for what has just been made for some hundred devices, and is there as long as they are.

    Called often enough, it has little to collect, and nobody ever walks over the objects of 10,000 devices, which would
    stop the loop for 100 ms. What is no longer referred to goes all the same, but for cycles, and there are none among them.
    """
    gc.collect()
    gc.freeze()
