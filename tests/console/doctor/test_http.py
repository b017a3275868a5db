"""The doctor asks who answers where HTTP is configured."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.config import Config
from agent.config.file import HttpConfig
from agent.config.typed import Listen
from agent.console.doctor import Finding, Level, Patient
from agent.console.doctor.kubelet import http
from tests.console.fakes import FakeDaemon
from tests.console.http.serving import free_port, served
from tests.wait import PATIENCE


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is nobody's silence."""
    monkeypatch.setattr("agent.console.doctor.kubelet._PATIENCE", PATIENCE)


def look(listen: str) -> Finding:
    (finding,) = http(Patient(Config(http=HttpConfig(Listen(listen)))))
    return finding


@contextmanager
def another() -> Iterator[int]:
    """Somebody else's server, which answers once."""

    def answer() -> None:
        link, _ = listener.accept()
        with link:
            link.recv(4096)
            link.sendall(b"HTTP/1.1 404 Not Found\r\n\r\nnone of ours")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(PATIENCE)


def test_it_may_be_off() -> None:
    assert look("off").level is Level.FINE


@pytest.mark.parametrize("over_tcp", [True, False])
async def test_it_is_fairlead_that_answers(tmp_path: Path, over_tcp: bool) -> None:
    port = free_port() if over_tcp else 0
    async with served(tmp_path, FakeDaemon(), port) as face:
        found = await asyncio.to_thread(look, f"127.0.0.1:{port}" if over_tcp else f"unix:{face.path}")
    assert found.level is Level.FINE, found


def test_something_else_has_the_port() -> None:
    with another() as port:
        found = look(f"127.0.0.1:{port}")
    assert (found.level, "Something else answers" in found.found) == (Level.FAILURE, True)


def test_nobody_answers(tmp_path: Path) -> None:
    for listen in (f"127.0.0.1:{free_port()}", f"unix:{tmp_path}/http.sock"):
        found = look(listen)
        assert (found.level, found.found.startswith(f"Nobody answers at {listen}: ")) == (Level.WARNING, True)
