"""What test_links runs in an isolated child process; each function returns JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

from tests.discovery.sources.stages import Interface, Links
from tests.wait import settled, until


def changes() -> Any:
    async def run() -> Any:
        it = Links(Path())
        told = []
        async with it.running():
            interface = Interface("ib0")
            todo: list[Callable[[], None]] = [
                lambda: interface.up(up=True),
                lambda: interface.up(up=False),
                lambda: interface.rename("ib7"),
                interface.remove,
            ]
            for change in ((lambda: None), *todo):
                change()
                await it.end()
                told.append([*dict.fromkeys(it.told)])  # a change may be told in several messages
                it.told.clear()
        return {"told": told, "right index": [it.indexes[name] == interface.index for name in ("ib0", "ib7")]}

    return anyio.run(run)


def wanted_late() -> Any:
    async def run() -> Any:
        it = Links(Path())
        it.want(wanted=False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(it.source.run)
            await settled()
            before = it.files()
            it.want(wanted=True)
            await until(lambda: it.told, "it is told")
            await it.end()
            tasks.cancel_scope.cancel()
            return {"told": it.told, "sockets": [before, it.files()]}

    return anyio.run(run)
