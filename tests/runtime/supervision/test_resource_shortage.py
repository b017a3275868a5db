from __future__ import annotations

import asyncio
import errno
from typing import Any

from structlog.testing import capture_logs

from agent.runtime.supervision.problems import Problems
from agent.runtime.supervision.resource_shortage import Shortage

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
