from __future__ import annotations

import gc
import weakref

import pytest

from agent.runtime import garbage


class Knot:
    """Refers to itself, as a connection does."""

    def __init__(self) -> None:
        self.itself = self


def test_what_the_start_made_is_left_alone_and_the_rest_collected_alike_on_every_python() -> None:
    before = gc.get_threshold()
    try:
        garbage.settle()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == (700, 10, 10)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


@pytest.mark.parametrize(("many", "stays"), [(10**9, False), (0, True)], ids=["few objects", "many objects"])
def test_what_lives_where_devices_come_is_kept_out_of_the_collectors_sight_if_it_is_much(
    many: int, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what ends later, as a connection does, would never be collected."""
    monkeypatch.setattr(garbage, "_MANY", many)
    connection = Knot()
    try:
        garbage.made(100)
        ended = weakref.ref(connection)
        del connection
        gc.collect()
        assert (ended() is not None) == stays
    finally:
        gc.unfreeze()
