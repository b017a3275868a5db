"""Measures this checkout beside another, in turns: `python -m bench.beside CHECKOUT`.

Events, one and two and storms of them, with eight devices; Allocates; restarts of the kubelet with 100 resources; start and
memory on the node that KubeVirt expects: what is built for other nodes must not cost that one anything.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from agent.config import file
from bench import messages, processes
from bench.figures import Figure, figure, table
from bench.kubelet import Kubelet
from bench.measures.allocate import AT_ONCE, HELD, held_round_trips, one_resource, round_trips, shared
from bench.measures.bursts import pair, second_events, storms_of
from bench.measures.lists import Side, in_turn, running_with
from bench.measures.registration import kubelet_restarts
from bench.processes import Agent, Offer, Process, many_nodes, one_node_each, resident
from tests.e2e import hermetic

_DEVICES: Final = 8
_RESOURCES: Final = 100
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


def events_beside(other: Path, events: int, seconds: float) -> list[Figure]:
    """One event, and another 5 ms after it; then uevents, so many seconds of each rate."""
    with tempfile.TemporaryDirectory() as home, ExitStack() as running:
        agents = [many_nodes(Path(home, name), _DEVICES, code) for name, code in (("a", messages.ROOT), ("b", other))]
        plays = [pair(agent) for agent in agents]
        for agent, (kubelet, _, _) in zip(agents, plays, strict=True):
            running.enter_context(running_with(agent, kubelet))
        last = [Side(kubelet, causes[0], lambda *_: None) for kubelet, causes, _ in plays]
        one = in_turn(last, events - events % 2)
        two = second_events(plays, 0.005, events)
    steady, storm, after, asked = hermetic.call("bench.beside:storms", str(other), seconds)
    return [
        figure("event_to_list", "8", "ms", one[0], one[1], "a node comes or goes"),
        figure("second_event", "5 ms later", "ms", two[0], two[1], "another one, so long after that"),
        figure("steady_cpu", "1,000 uevents/s", "%", steady[0], steady[1], "CPU time meanwhile"),
        figure("storm_cpu", f"{seconds * 10_000:,.0f} uevents", "s", storm[0], storm[1], "10,000 a second"),
        figure("storm_to_list", "right after it", "ms", after[0], after[1], "a change"),
        figure("storm_allocate", "during it", "ms", asked[0], asked[1], "an Allocate of what is held"),
    ]


def kubelet_beside(other: Path, agents: int, restarts: int) -> list[Figure]:
    """Allocates, one by one and many at once; and restarts of the kubelet, with the memory after them."""
    codes = messages.ROOT, other

    def make(home: Path) -> list[Process]:
        return [one_resource(home / f"{n}", code) for n, code in enumerate(codes)]

    one, many = round_trips(make, agents), round_trips(make, agents, AT_ONCE)
    mine, theirs = held_round_trips(lambda home: [shared(home / f"{n}", it) for n, it in enumerate(codes)], 20 * agents)
    with tempfile.TemporaryDirectory() as home:
        each = [one_node_each(Path(home, f"{n}"), _RESOURCES, code) for n, code in enumerate(codes)]
        took, memory = kubelet_restarts(each, _RESOURCES, restarts)
    return [
        figure("allocate", "1", "ms", one[0], one[1], "one call after the other"),
        *(
            figure("allocate", f"1, {held:,} held", "ms", mine[n], theirs[n], "while so much is held")
            for n, held in enumerate(HELD)
        ),
        figure("allocate_concurrent", f"{AT_ONCE}", "ms", many[0], many[1], "so many at once"),
        figure("kubelet_to_registered", f"{_RESOURCES}", "ms", took[0], took[1], "until the last is registered"),
        figure("rss", f"{_RESOURCES} resources, {restarts} restarts", "MB", memory[:1], memory[1:], _RSS),
    ]


def storms(other: str, seconds: float) -> list[list[list[float]]]:
    return storms_of(
        [partial(many_nodes, devices=_DEVICES, code=code) for code in (messages.ROOT, Path(other))], seconds
    )


def _start(code: Path) -> tuple[float, float]:
    """How long it took, in ms, and the memory after it, in MB."""
    resources = file._DEFAULTS["resource"]
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
    parser.add_argument(
        "--starts", type=int, default=20, help="of each, and as many restarts of the kubelet (default: 20)"
    )
    parser.add_argument("--events", type=int, default=100, help="of each (default: 100)")
    parser.add_argument("--agents", type=int, default=5, help="of each, asked for 110 devices (default: 5)")
    arguments = parser.parse_args()
    other: Path = arguments.checkout.resolve()
    if not (other / "agent").is_dir():
        parser.error(f"{other} has no agent/: it is no checkout of Fairlead")
    processes.set_up()
    processes.compile_all(other)
    figures = [
        *events_beside(other, arguments.events, 10.0),
        *kubelet_beside(other, arguments.agents, arguments.starts),
        *beside(other, arguments.starts),
    ]
    print(table(figures, "other"))


if __name__ == "__main__":
    main()
