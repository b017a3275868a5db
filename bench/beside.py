"""Measures this checkout beside another, on the node that KubeVirt expects: `python -m bench.beside CHECKOUT`.

The start and the memory of the two, in turns: what is built for other nodes must not cost this one anything.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Final

from agent.config import kubevirt
from bench import messages, processes
from bench.figures import Figure, figure, table
from bench.kubelet import Kubelet
from bench.processes import Agent, Offer, resident

_SETTLE: Final = 2.0  # seconds after the registration
_EXEC: Final = "from before the process is made until the last resource's ListAndWatch is open"
_RSS: Final = "VmRSS 2 s after the registration"


def beside(other: Path, starts: int) -> list[Figure]:
    """Start and memory, the other checkout as the baseline."""
    sides = (messages.ROOT, other)
    times: dict[Path, list[float]] = {side: [] for side in sides}
    memory: dict[Path, list[float]] = {side: [] for side in sides}
    for turn in range(starts):
        for side in sides if turn % 2 else reversed(sides):
            took, rss = _start(side)
            times[side].append(took)
            memory[side].append(rss)
    return [
        figure("exec_to_registered", "KubeVirt", "ms", times[messages.ROOT], times[other], _EXEC),
        figure("rss", "KubeVirt", "MB", memory[messages.ROOT], memory[other], _RSS),
    ]


def _start(code: Path) -> tuple[float, float]:
    """How long it took, in ms, and the memory after it, in MB."""
    resources = kubevirt.TABLES["resource"]
    with tempfile.TemporaryDirectory() as home:
        agent = Agent(
            Path(home, "a"), [Offer(it["name"], it["paths"][0]["path"], it["count"]) for it in resources], code=code
        )
        for minor, it in enumerate(resources):
            agent.make_node(it["paths"][0]["path"].removeprefix("/dev/"), minor)
        kubelet = Kubelet(agent.plugin_dir)
        kubelet.start()
        try:
            before = agent.start()
            took = kubelet.await_registered(len(resources)) - before
            time.sleep(_SETTLE)
            return took * 1e3, resident(agent.pid)
        finally:
            agent.stop()
            kubelet.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.beside", description=__doc__)
    parser.add_argument("checkout", type=Path, help="the other one; it runs with this one's dependencies")
    parser.add_argument("--starts", type=int, default=20, help="of each (default: 20)")
    arguments = parser.parse_args()
    other: Path = arguments.checkout.resolve()
    if not (other / "agent").is_dir():
        parser.error(f"{other} has no agent/: it is no checkout of Fairlead")
    processes.set_up()
    processes.compile_all(other)
    print(table(beside(other, arguments.starts)))


if __name__ == "__main__":
    main()
