"""Joins another process's network namespace and injects kernel events there.

Each line of stdin is `action name`, of a device node in /dev, perhaps with `KEY=value`s that the event bears too; an
empty line is answered with one.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from tests.e2e.hermetic import Injector, join_network
from tests.e2e.process import Process
from tests.wait import limit

Inject = Callable[[Iterable[tuple[str, str]]], Awaitable[None]]
"""Sends (action, name) events; returns when all are sent."""


@asynccontextmanager
async def injector(pid: int) -> AsyncIterator[Inject]:
    """What injects events where the process of this ID is."""
    async with Process(code=f"from {__name__} import main; main({pid})") as process:

        async def inject(events: Iterable[tuple[str, str]]) -> None:
            process.stdin.write("".join(f"{action} {name}\n" for action, name in events).encode() + b"\n")
            async with limit("the injection of events"):
                assert await process.stdout.readline() == b"\n"

        await inject([])
        yield inject


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
