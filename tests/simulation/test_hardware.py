from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.simulation import demo_stage
from agent.simulation.demo_stage import LoopDevice, write_stub_file
from tests.needs import skip_without


@pytest.fixture
def loop_device() -> Iterator[LoopDevice]:
    skip_without("loop devices")
    device = LoopDevice(random.SystemRandom().randrange(10_000, 1 << 20))
    device.add()
    yield device
    device.remove()


def test_a_loop_device_comes_and_goes(loop_device: LoopDevice) -> None:
    assert Path("/dev", loop_device.name).is_block_device()
    loop_device.remove()
    assert not Path("/dev", loop_device.name).exists()
    loop_device.remove()  # it is gone: no error


def test_a_loop_device_that_udevd_reads_is_removed_when_it_has(
    loop_device: LoopDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = [os.open(f"/dev/{loop_device.name}", os.O_RDONLY)]

    def sleep(seconds: float) -> None:
        while readers:
            os.close(readers.pop())

    monkeypatch.setattr(demo_stage, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    loop_device.remove()
    assert not readers
    assert not Path("/dev", loop_device.name).exists()


def test_a_free_loop_device_is_one_that_nobody_has() -> None:
    if (free := LoopDevice.free()) is not None:
        assert not Path("/dev", free.name).exists()


def test_a_stub_file_is_replaced_at_once(tmp_path: Path) -> None:
    file = tmp_path / "stub"
    write_stub_file(file, "stub-0 gone\n")
    with file.open() as before:
        write_stub_file(file, "")
        assert before.read() == "stub-0 gone\n"
    assert file.read_text() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["stub"]


def test_two_processes_choose_different_loop_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("add", "remove"):
        monkeypatch.setattr(LoopDevice, call, lambda self: None)
    chosen = set()
    for pid in (41, 42, 1798):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        device = LoopDevice.free()
        assert device is not None
        assert not Path("/dev", device.name).exists()
        chosen.add(device.number)
    assert len(chosen) == 3
