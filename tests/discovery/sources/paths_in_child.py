"""What test_paths runs in an isolated child process; it returns JSON."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio

from agent.discovery.paths import Change, DirectoryWatch
from tests.e2e.hermetic import private_tmpfs
from tests.e2e.hermetic import unmount as take_off
from tests.wait import limit


def unmount(directory: str) -> list[tuple[str, str]]:
    """Changes told when a file system over a wanted directory goes."""
    wanted = Path(directory)
    (wanted / "below").mkdir()
    private_tmpfs(directory)
    changes: list[tuple[str, str]] = []
    ended = asyncio.Event()

    def take(path: Path, change: Change) -> None:
        changes.append((path.relative_to(wanted).as_posix(), change.value))
        if path.name == "below":
            ended.set()

    async def run() -> None:
        watch = DirectoryWatch(take, lambda: None)
        watch.watch(frozenset({wanted}))
        async with anyio.create_task_group() as tasks:
            await tasks.start(watch.run)
            take_off(directory)
            async with limit("the directory below is told", lambda: changes):
                await ended.wait()
            tasks.cancel_scope.cancel()

    anyio.run(run)
    return changes
