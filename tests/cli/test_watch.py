"""A screen that follows the daemon: its head stays, it outlives the daemon, and q ends it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import sys
import termios
from pathlib import Path
from typing import Self

import click
import pytest
from msgspec.structs import replace

from agent.cli.device_history import spark
from agent.console.views import Device, Event, Held, Holder, Period, Resource
from tests.cli.daemon import running
from tests.console.fakes import GPU, FakeDaemon, status
from tests.wait import block_until

FAIRLEAD = Path(sys.executable).with_name("fairlead")


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 100, rows: int = 12) -> None:
        self._process, self._end = pty.fork()
        if self._process == 0:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            ours = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
            os.execve(FAIRLEAD, ["fairlead", *arguments], ours)
        self.said = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)

    @property
    def screen(self) -> str:
        """What was drawn last, without colours."""
        while select.select([self._end], [], [], 0)[0]:
            try:
                self.said += os.read(self._end, 65536).decode(errors="replace")
            except OSError:  # it has ended
                break
        return self.said.rpartition("\x1b[H")[2]

    def shows(self, *texts: str) -> list[str]:
        block_until(
            lambda: all(text in self.screen for text in texts), f"{texts} on the screen", lambda: self.said[-2000:]
        )
        return self.screen.replace("\x1b[K", "").split("\r\n")

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def ended(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.toml"
    file.write_text(f'[agent]\nadmin_socket = "{tmp_path}/admin.sock"\n')
    return str(file)


def node(number: int = 20) -> FakeDaemon:
    devices = [
        replace(GPU, key=f"GPU-{n:02}", ids=(f"GPU-{n:02}",), hardware=(f"pci:0000:{n:02x}:00.0",))
        for n in range(number)
    ]
    devices[0] = replace(devices[0], held=(Held("GPU-00", (Holder("team", "training-0", "main"),)),))
    past: dict[str, tuple[Period, ...]] = {
        "GPU-01": (Period(0.0, 1700.0, "Healthy"), Period(1700.0, 2000.0, "Unhealthy", "xid-79"))
    }
    return FakeDaemon(status(Resource("nvidia.com/gpu", "gpu", True, True, devices=tuple(devices))), past=past)


def test_on_eighty_columns_there_is_room_for_the_last_hour_and_the_pod(config: str, tmp_path: Path) -> None:
    lost = replace(GPU, state="Unhealthy", reason="node-missing", since=1700.0, model="ConnectX-7 Dx", name="mlx5_0")
    pod = Holder("machine-learning", "training-run-of-monday-0", "main")
    devices = (replace(lost, held=(Held("GPU-1", (pod,)),)),)
    node = FakeDaemon(status(Resource("example.com/infiniband", "infiniband", True, True, devices=devices)))
    command = ["devices", "--watch", "--config", config]
    with running(node, tmp_path / "admin.sock"), Terminal(*command, columns=80) as terminal:
        shown = map(click.unstyle, terminal.shows("q ends", "node-missing"))
        (row,) = [line for line in shown if line.startswith("mlx5_0")]
        assert row.endswith("monday-0")
        assert len(row) <= 80


@pytest.mark.parametrize("command", ["devices", "status"])
def test_the_head_stays_and_what_has_no_room_is_counted(command: str, config: str, tmp_path: Path) -> None:
    with running(node(), tmp_path / "admin.sock"), Terminal(command, "--watch", "--config", config) as terminal:
        lines = terminal.shows("q ends", " more; ")
        assert len(lines) == 12
        assert lines[0].startswith("Fairlead 1.2.3 on ")
        assert "20 devices, all well" in lines[1]
        if command == "devices":
            assert "LAST HOUR" in lines[2]
            assert "team/training-0" in lines[3]
            assert "█" in lines[4]
            assert "12 more; " in lines[-1]
            assert "▁ free ▃ used ▅ drained ▆ degraded █ bad · gone" in lines[-1]
        terminal.type("q")
        assert terminal.ended() == 0
        assert terminal.said.startswith("\x1b[?1049h")
        assert terminal.screen.endswith("\x1b[?1049l") or terminal.said.endswith("\x1b[?1049l")


def test_without_room_for_all_troubles_and_what_to_do_come_first(config: str, tmp_path: Path) -> None:
    fallen = replace(GPU, state="Unhealthy", reason="xid-79", message="It fell off its bus.", name="nvidia20")
    (resource,) = node().shown.resources
    devices = (*resource.devices, replace(fallen, key="GPU-20", ids=("GPU-20",), hardware=("pci:0000:20:00.0",)))
    shown = FakeDaemon(status(replace(resource, devices=devices)))
    with running(shown, tmp_path / "admin.sock"):
        with Terminal("status", "--watch", "--config", config, columns=80, rows=24) as terminal:
            text = click.unstyle("\n".join(terminal.shows("nvidia20", "q ends")))
            assert "systemctl reboot\n" in text  # a long command is folded, and can be copied as it is
            assert (
                text.index("systemctl reboot")
                < text.index("RESOURCE  ")
                < text.index("xid-79  ")
                < text.index("GPU-00  ")
            )
            terminal.type("q")
            assert terminal.ended() == 0
        with Terminal("devices", "--watch", "--config", config) as terminal:
            (first, *_) = [line for line in terminal.shows("nvidia20", "q ends") if "GPU-" in line or "nvidia" in line]
            assert first.startswith("nvidia20")
            terminal.type("q")
            assert terminal.ended() == 0


def test_it_outlives_the_daemon_and_goes_on_with_the_next_one(config: str, tmp_path: Path) -> None:
    socket = tmp_path / "admin.sock"
    with running(node(2), socket):
        terminal = Terminal("devices", "--watch", "--config", config)
        terminal.shows("2 devices, all well", "q ends")
    with terminal:
        lines = terminal.shows("waiting for Fairlead since ")
        assert "this is how it was" in lines[0]
        assert any("GPU-01" in line for line in lines)
        with running(node(3), socket):
            assert "waiting" not in terminal.shows("3 devices, all well")[0]
            terminal.type("q")
            assert terminal.ended() == 0


def test_each_change_is_drawn(config: str, tmp_path: Path) -> None:
    daemon = node(1)
    with running(daemon, tmp_path / "admin.sock"), Terminal("devices", "--watch", "--config", config) as terminal:
        terminal.shows("1 device, all well")
        sick = Device("GPU-00", ("GPU-00",), "Unhealthy", "xid-79", "It fell.", hardware=("pci:0000:00:00.0",))
        daemon.shown = status(Resource("nvidia.com/gpu", "gpu", True, True, devices=(sick,)))
        daemon.news.put_nowait(Event(1, 1.0, "device-changed"))
        terminal.shows("1 device: 1 unhealthy", "xid-79")
        terminal.type("q")
        assert terminal.ended() == 0


def test_without_a_daemon_at_the_start_there_is_a_reason_and_no_screen(config: str) -> None:
    with Terminal("devices", "--watch", "--config", config) as terminal:
        assert "no Fairlead answers" in " ".join(terminal.shows("no Fairlead answers"))
        assert terminal.ended() == 1
        assert "\x1b[?1049h" not in terminal.said


def test_the_last_hour_is_a_strip_of_twelve_signs_with_the_worst_of_each() -> None:
    periods = (
        Period(0.0, 90_000.0, "Healthy"),
        Period(90_000.0, 91_000.0, "Healthy", holders=("team/a",)),
        Period(91_000.0, 91_001.0, "Unhealthy", "xid-79"),
        Period(91_001.0, 92_000.0, "Drained"),
    )
    strip = spark(periods, 92_000.0)
    signs = "".join(it for it in strip if it in "▁▃▅▆█·")
    assert len(signs) == 12
    assert signs == "▁▁▁▁▁▃▃▃█▅▅▅"
    assert spark((), 1.0) == ""
