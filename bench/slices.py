"""Measures ResourceSlices beside a stand-in of the API server: from a start, from an event, in a storm: `python -m bench.slices`.

Needs root, to make device nodes. The stand-in runs in this process: its share is the time from the request to the answer, and is
no part of what is shown. The memory is compared with the same node by device plugin.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench import processes
from bench.processes import Agent, resident
from tests.apiserver import NODE, ApiServer

_POOLS: Final = 16
_APART: Final = 2.0  # seconds between two events: none of them belongs to a storm
_FLAPS: Final = 500  # a node that comes and goes so often is a thousand changes
_CLOSING: Final = 0.2  # seconds in which its connections end
_QUIET: Final = 6.0  # seconds after which a storm's last write has been made


def _configuration(server: ApiServer, home: Path, *, is_dra: bool) -> str:
    serve = 'serve = "dra"\n' if is_dra else ""
    resources = "".join(
        f'[[resource]]\nname = "bench.test/p{n}"\nbackend = "chardev"\npaths = [{{ path = "/dev/p{n}/*" }}]\n{serve}'
        for n in range(_POOLS)
    )
    kubeconfig = server.kubeconfig(home / "kubeconfig")
    return f'{resources}[dra]\nnode = "{NODE}"\nkubeconfig = "{kubeconfig}"\n'


async def _until(holds: Callable[[], bool]) -> float:
    """Wait for a condition; when it held."""
    while not holds():  # noqa: ASYNC110  # what another process does
        await asyncio.sleep(0.0005)
    return time.perf_counter()


async def measure(devices: int, events: int) -> None:
    """Print the figures of one node."""
    memory = {}
    for is_dra in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            home = Path(directory)
            async with ApiServer().running() as server:
                agent = Agent(home, [], more=_configuration(server, home, is_dra=is_dra))
                for number in range(devices):
                    agent.make_node(f"p{number % _POOLS}/d{number}", number)
                began = agent.start()
                try:
                    if is_dra:
                        await _measured(server, agent, devices, events, began)
                    else:
                        await asyncio.sleep(3.0)
                    memory[is_dra] = resident(agent.pid)
                finally:
                    agent.stop()
                await asyncio.sleep(_CLOSING)
    print(f"memory: {memory[False]:.1f} MB by device plugin, {memory[True]:.1f} MB by DRA")


async def _measured(server: ApiServer, agent: Agent, devices: int, events: int, began: float) -> None:
    objects, arrived = server.objects, list[float]()

    def note(method: str, _path: str) -> None:
        if method in ("POST", "PUT"):
            arrived.append(time.perf_counter())

    objects.refuses = note
    written = await _until(lambda: sum(len(it["spec"]["devices"]) for it in objects.slices.values()) == devices)
    print(f"start of the process to all slices of {devices} devices in {_POOLS} pools: {written - began:.2f} s")
    taken = []
    for number in range(events):
        await asyncio.sleep(_APART)
        arrived.clear()
        at = time.perf_counter()
        agent.make_node(f"p3/new{number}", devices + number)
        await _until(lambda: bool(arrived))
        taken.append((arrived[0] - at) * 1000)
    print(
        f"node made to request: min {min(taken):.1f}, p50 {statistics.median(taken):.1f}, max {max(taken):.1f} ms, n {events}"
    )
    before = len(objects.writes)
    for _ in range(_FLAPS):
        agent.make_node("p5/flap", 2 * devices)
        await asyncio.sleep(0.01)
        agent.node("p5/flap").unlink()
        await asyncio.sleep(0.01)
    await asyncio.sleep(_QUIET)
    is_right = "flap" not in str(objects.pool(f"{NODE}/bench.test/p5"))
    print(
        f"a storm of {2 * _FLAPS} changes: {len(objects.writes) - before} writes, the last one {'right' if is_right else 'WRONG'}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.slices", description=__doc__)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--events", type=int, default=30)
    arguments = parser.parse_args()
    processes.set_up()
    asyncio.run(measure(arguments.devices, arguments.events))
