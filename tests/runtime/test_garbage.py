from __future__ import annotations

import gc

from agent.runtime import garbage


def test_what_the_start_made_is_left_alone_and_the_rest_collected_alike_on_every_python() -> None:
    before = gc.get_threshold()
    try:
        garbage.settle()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
