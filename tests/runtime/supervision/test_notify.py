from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.runtime import watchdog
from agent.runtime.watchdog import Notifier
from tests.wait import PATIENCE


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket such as systemd's, and its name as NOTIFY_SOCKET gives it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@fairlead-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0"))
        sock.settimeout(PATIENCE)
        yield sock, name


def test_systemd_hears_each_state_as_one_message(systemd: tuple[socket.socket, str]) -> None:
    sock, name = systemd
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": name})
    notifier.ready("3 resources registered")
    notifier.status("waiting for\nthe kubelet")
    notifier.stopping()
    assert [sock.recv(1000) for _ in range(3)] == [
        b"READY=1\nSTATUS=3 resources registered",
        b"STATUS=waiting for the kubelet",
        b"STOPPING=1\nSTATUS=stopping",
    ]


def test_a_reload_is_told_with_the_moment_it_began(
    systemd: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = SimpleNamespace(CLOCK_MONOTONIC="monotonic", clock_gettime_ns={"monotonic": 7_654_321}.__getitem__)
    monkeypatch.setattr(watchdog, "time", clocks)
    sock, name = systemd
    Notifier(name).reloading()
    assert sock.recv(1000) == b"RELOADING=1\nMONOTONIC_USEC=7654\nSTATUS=reading the configuration again"


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_is_fed_if_systemd_asks_this_process_for_it(
    systemd: tuple[socket.socket, str], environment: dict[str, str], seconds: float | None
) -> None:
    sock, name = systemd
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": name, **environment}, pid=7)
    assert notifier.watchdog == seconds
    notifier.feed()
    notifier.status("fed")
    assert sock.recv(1000) == (b"WATCHDOG=1" if seconds else b"STATUS=fed")


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}])
def test_without_systemd_nothing_is_said(environment: dict[str, str]) -> None:
    notifier = Notifier.from_environment(environment)
    assert notifier.address is None
    notifier.ready("to nobody")


@pytest.mark.parametrize("address", ["/does/not/exist", "x" * 200, "/with\0zero", "vsock:2:1234"])
def test_a_socket_that_cannot_be_reached_is_no_reason_to_fail(address: str) -> None:
    Notifier(address).ready("\ud800")


def test_a_systemd_that_does_not_read_does_not_hold_us(systemd: tuple[socket.socket, str]) -> None:
    _, name = systemd
    for _ in range(2000):
        Notifier(name).status("x" * 100)
