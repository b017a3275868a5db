"""Joins another process's network namespace and injects kernel events there: `python -m tests.e2e.inject PID`.

Each line of stdin is `action name`, of a device node in /dev, perhaps with `KEY=value`s that the event bears too; an
empty line is answered with one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from tests.e2e.hermetic import Injector, join_network
from tests.e2e.process import PATIENCE, REPOSITORY

Inject = Callable[[Iterable[tuple[str, str]]], Awaitable[None]]
"""Sends (action, name) events; returns when all are sent."""


@asynccontextmanager
async def injector(pid: int) -> AsyncIterator[Inject]:
    """What injects events where the process of this ID is."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, str(pid),
        cwd=REPOSITORY, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    source, sink = process.stdout, process.stdin

    async def inject(events: Iterable[tuple[str, str]]) -> None:
        sink.write("".join(f"{action} {name}\n" for action, name in events).encode() + b"\n")
        assert await asyncio.wait_for(source.readline(), PATIENCE) == b"\n"

    try:
        await inject([])
        yield inject
    finally:
        process.kill()
        await process.communicate()


def main(pid: int) -> None:
    join_network(pid)
    send = Injector()
    for line in sys.stdin:
        if not line.strip():
            print(flush=True)
            continue
        action, name, *pairs = line.split()
        properties = dict(pair.split("=", 1) for pair in pairs)
        send.kernel(action, f"/devices/virtual/mem/{name}", "mem", DEVNAME=name, **properties)


if __name__ == "__main__":
    main(int(sys.argv[1]))
