"""Counts the functions and modules of ours on the daemon's ways: `python -m bench.ways`, `--list WAY` to read one.

A way is what runs between a cause and its effect, in any thread: the functions that ran in every one of a few rounds, so
that what a timer does by chance in the same moment does not count; comprehensions and lambdas are part of the function they
are in. What a way costs is a measure of `python -m bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from tests.e2e import forkserver
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess
from tests.wait import until

_ROUNDS: Final = 5

_RECORDER: Final = """
import json, os, signal, sys, threading
from agent.runtime import logs  # all that is imported later is seen
recorded, on = dict(), [False]
root = os.getcwd() + os.sep
def record(frame, event, _):
    if on[0] and event == "call":
        code = frame.f_code
        if code.co_filename.startswith((root + "agent", root + "backends")) and "/api/" not in code.co_filename:
            if not code.co_name.startswith("<"):
                recorded.setdefault((code.co_filename[len(root):], code.co_qualname))
def begin(*_):
    recorded.clear()
    on[0] = True
def end(*_):
    on[0] = False
    with open(FILE + ".new", "w") as file:
        json.dump(list(recorded), file)
    os.rename(FILE + ".new", FILE)
signal.signal(signal.SIGTTIN, begin)
signal.signal(signal.SIGTTOU, end)
threading.setprofile(record)
sys.setprofile(record)
"""

Function = tuple[str, str]
"""File and qualified name."""


class Limit(NamedTuple):
    """What a way may take at most (../shared/house.md, "How long the ways may be")."""

    functions: int
    modules: int


class Ways:
    """An agent whose ways can be walked."""

    def __init__(self, node: Node, agent: AgentProcess, file: Path) -> None:
        self._node, self._agent, self._file = node, agent, file
        self._numbers = count(2)

    async def event_to_list(self) -> None:
        number = next(self._numbers)
        self._node.mknod(f"w{number}")
        await self._node.shows(lambda k: f"w{number}" in k.resources[WIDGET].healthy)

    async def allocate(self) -> None:
        await self._node.admit(pod(f"p{next(self._numbers)}"))

    async def kubelet_to_registered(self) -> None:
        await self._node.kubelet.restart()
        await self._node.registered()

    async def reload_unchanged(self) -> None:
        times = len(self._agent.said("config-unchanged")) + 1
        self._agent.signal(signal.SIGHUP)
        await self._agent.says("config-unchanged", times=times)

    async def reload_changed(self) -> None:
        """The file is written, with another number of tokens for each device."""
        times = len(self._agent.said("config-reloaded")) + 1
        self._node.config(chardev(count=1 + times % 2))
        await self._agent.says("config-reloaded", times=times)

    async def walk(self, way: Callable[[], Awaitable[None]]) -> list[Function]:
        """The functions that ran in each round, in the order in which they first did."""
        rounds = []
        for _ in range(_ROUNDS):
            await self._agent.takes_turns(5)
            self._agent.signal(signal.SIGTTIN)
            await self._agent.takes_turns(1)
            await way()
            self._agent.signal(signal.SIGTTOU)
            await until(self._file.exists, "what was recorded")
            rounds.append([(file, name) for file, name in json.loads(self._file.read_text())])
            self._file.unlink()
        return [function for function in rounds[-1] if all(function in others for others in rounds)]


WAYS: Final[dict[Callable[[Ways], Awaitable[None]], Limit]] = {
    Ways.event_to_list: Limit(80, 20),
    Ways.allocate: Limit(40, 14),
    Ways.kubelet_to_registered: Limit(45, 9),
    Ways.reload_unchanged: Limit(120, 25),
    Ways.reload_changed: Limit(200, 45),
}


@asynccontextmanager
async def _ways(root: Path) -> AsyncIterator[Ways]:
    node, file = Node(root), root / "recorded"
    node.mknod("w1", *(f"x{number}" for number in range(20)))
    async with node.kubelet, node.agent(chardev(), prelude=f"FILE = {str(file)!r}\n{_RECORDER}") as agent:
        await node.healthy("w1")
        yield Ways(node, agent, file)


async def _walked() -> dict[str, tuple[list[Function], Limit]]:
    with tempfile.TemporaryDirectory() as root:
        async with _ways(Path(root)) as ways:
            return {way.__name__: (await ways.walk(lambda way=way: way(ways)), limit) for way, limit in WAYS.items()}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ways", description=__doc__)
    parser.add_argument("--list", choices=[way.__name__ for way in WAYS], help="print the functions of this way")
    listed = parser.parse_args().list
    walked = asyncio.run(_walked())
    forkserver.stop()
    print(f"{'way':24}functions  modules  at most")
    for name, (functions, limit) in walked.items():
        modules = len({file for file, _ in functions})
        print(f"{name:24}{len(functions):9}{modules:9}  {limit.functions}/{limit.modules}")
    for file, name in walked[listed][0] if listed else ():
        print(f"  {file}: {name}")


if __name__ == "__main__":
    main()
