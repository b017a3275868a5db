from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import HostPath
from backends.linux import sysfs
from tests.backends.trees import planted_host


def test_the_entries_of_a_directory_come_in_order_and_none_of_one_that_is_missing(tmp_path: Path) -> None:
    host = planted_host(tmp_path, "sys/class/rtc/rtc1/\nsys/class/rtc/rtc0 -> ../../gone")
    assert sysfs.entries(host, HostPath("/sys/class/rtc")) == ["rtc0", "rtc1"]
    assert sysfs.entries(host, HostPath("/sys/class/ptp")) == []


def test_entries_that_cannot_be_read_are_not_taken_for_none(tmp_path: Path) -> None:
    host = planted_host(tmp_path, "sys/class/rtc")
    with pytest.raises(NotADirectoryError):
        sysfs.entries(host, HostPath("/sys/class/rtc"))
