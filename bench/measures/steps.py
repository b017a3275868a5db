"""The longest step of the event loop with thousands of devices, half of them held: `loop_step_max`.

In a step nothing else runs: as long as the longest one, an Allocate may have to wait. It is measured in the CPU time of the
loop's thread, in a daemon of its own, with a simulated kubelet.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.figures import Figure, figure
from tests.e2e import forkserver
from tests.e2e.crowd import Crowd
from tests.e2e.node import Node

DEVICES: Final = 10_000

_HOW: Final = (
    "the longest step of the loop, in CPU time of its thread, while this happens to all devices at once, half of which "
    "pods hold; there is no baseline"
)


def loop_step_max(rounds: int) -> list[Figure]:
    """One figure for each thing that happens."""
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as root:
            for what, milliseconds in asyncio.run(_round(Path(root))).items():
                taken[what].append(milliseconds)
    forkserver.stop()
    return [_figure(what, samples) for what, samples in taken.items()]


def _figure(what: str, samples: Sequence[float]) -> Figure:
    return figure("loop_step_max", what, "ms", samples, [0.0], _HOW)


async def _round(root: Path) -> Mapping[str, float]:
    longest: dict[str, float] = {}
    node = Node(root)
    crowd = Crowd(node, DEVICES, counted=False)

    def note(what: str) -> None:
        longest[what] = crowd.longest().cost * 1e3

    async with node.kubelet:
        async with crowd.agent() as agent:
            note("first look")
            await crowd.hold()
            note("allocation")
            await agent.kill()
        async with crowd.agent() as agent:
            await agent.kill()
        note("start with claims")
        node.lose_state()
        async with crowd.agent() as agent:
            await agent.says("claims-adopted", count=crowd.held)
            note("start without state")
            await crowd.go()
            note("all go")
            await crowd.come_back()
            note("all come back")
            await crowd.give_other_ids(agent)
            note("reload")
            await crowd.ask()
            note("questions")
            await crowd.rename(agent)
            note("reload, renamed")
            await crowd.end(agent)
        note("claims end")
    return longest
