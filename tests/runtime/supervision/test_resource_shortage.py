from __future__ import annotations

import asyncio
import errno
import socket
from asyncio import constants
from pathlib import Path
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from agent.runtime.problems import Problems
from agent.runtime.process import Shortage
from tests.wait import settled

EMPTY = OSError(errno.EMFILE, "Too many open files")


def test_a_shortage_is_told_once_as_long_as_it_lasts() -> None:
    now = 5.0
    it = Shortage(Problems(lambda: now))
    with capture_logs() as logs:
        for _ in range(100):
            it.tell(EMPTY)
            now += 1
        now += 60
        it.tell(EMPTY)
    assert [line["reason"] for line in logs] == ["Too many open files"] * 2


async def test_all_else_is_the_loops_to_tell() -> None:
    passed: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()

    class Loop:
        def default_exception_handler(self, context: dict[str, Any]) -> None:
            passed.append(context)

    others: list[dict[str, Any]] = [
        {"message": "x", "exception": OSError(errno.EPERM, "no"), "socket": 1},
        {"message": "x", "exception": EMPTY},
        {"message": "x"},
    ]
    with capture_logs() as logs:
        for context in [*others, {"message": "socket.accept()", "exception": EMPTY, "socket": 1}]:
            Shortage(Problems()).handle(Loop(), context)  # type: ignore[arg-type]
    assert passed == others
    assert [line["event"] for line in logs] == ["connections-wait"]
    assert loop.is_running()


async def test_a_server_that_closes_while_connections_wait_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loop, told = asyncio.get_running_loop(), list[dict[str, Any]]()
    monkeypatch.setattr(constants, "ACCEPT_RETRY_DELAY", 0.0)
    monkeypatch.setattr(loop, "default_exception_handler", told.append)
    shortage = Shortage(Problems())
    loop.set_exception_handler(shortage.handle)

    class Starved(socket.socket):
        def accept(self) -> NoReturn:
            loop.call_soon(server.close)
            raise EMPTY

    listening = Starved(socket.AF_UNIX)
    listening.bind(str(tmp_path / "x.sock"))
    server = await asyncio.start_unix_server(lambda *_: None, sock=listening)
    with socket.socket(socket.AF_UNIX) as client, capture_logs() as logs:
        client.connect(str(tmp_path / "x.sock"))
        await settled()
    assert [line["event"] for line in logs] == ["connections-wait"]
    assert told == []
