from __future__ import annotations

from pathlib import Path

from tests.e2e import hermetic

CHILD = "tests.backends.chardev.usb_in_child"
HINTS = 6  # of a stick that comes and goes, as made up here, in the subsystems that are listened to


def test_a_stick_is_followed_through_its_events(tmp_path: Path) -> None:
    assert hermetic.call(f"{CHILD}:replug", str(tmp_path)) == ["/dev/bus/usb/001/006", "/dev/ttyUSB0"]


def test_a_stick_that_flaps_costs_a_bounded_number_of_looks_and_ends_right(tmp_path: Path) -> None:
    seen = hermetic.call(f"{CHILD}:flap", str(tmp_path), 25, True)
    assert seen["hints"] == 25 * HINTS + 4
    assert seen["looks"] <= seen["hints"]  # some 50, one for each time it came or went
    assert seen["looks when quiet"] <= 1  # the last event may come after what it tells of has been seen
    assert seen["problems"] == []


def test_hints_that_wait_cost_one_look(tmp_path: Path) -> None:
    seen = hermetic.call(f"{CHILD}:flap", str(tmp_path), 50, False)
    assert seen["hints"] == 50 * HINTS + 4
    assert seen["looks"] + seen["looks when quiet"] <= 6  # one for each batch that the source hands on, not 304
