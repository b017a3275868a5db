"""From an event to the list in the kubelet, agent and baseline in turn: `event_to_list`, `tokens_to_list`."""

from __future__ import annotations

import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import messages
from bench.figures import Figure, figure
from bench.kubelet import Kubelet
from bench.names import device_names, resource_names
from bench.processes import Agent, Bare, Baseline, Offer, OnNodes, Process, many_nodes
from tests.e2e import hermetic

_GAP: Final = 0.055  # seconds after each event: one side's events are at least 110 ms apart
_WITHIN: Final = 10.0  # seconds for a list to come
_SETTLE: Final = 0.3  # seconds after the first list, for a start to be over

_MKNOD: Final = "mknod or unlink of one node, seen by inotify; until the whole list is in the kubelet"
_UEVENT: Final = (
    "an injected uevent of a node whose sysfs says another NUMA node; until the whole list is in the kubelet"
)
_TOKENS: Final = "mknod or unlink of the node that all tokens are of; until the whole list is in the kubelet"


@dataclass(frozen=True, slots=True)
class Side:
    """The agent or a baseline: how to cause its events, and where its lists arrive."""

    kubelet: Kubelet
    cause: Callable[[], None]
    check: Callable[[Any, int], None]
    """Raises unless a list, the message, shows what the event of that number did."""
    prepare: Callable[[], None] = lambda: None
    """Done before the clock starts."""


Samples = list[list[float]]
"""Milliseconds: the agent's, the baseline's, and those of the bare plugin where it takes part."""


def event_to_list(devices: int, events: int) -> Figure:
    """One of many nodes comes and goes."""

    def on_last_node(process: OnNodes) -> Side:
        return comes_and_goes(process, device_names(devices)[-1], devices - 1, devices)

    samples = in_turn_with_baseline(
        partial(many_nodes, devices=devices), on_last_node, devices, "one", events, on_last_node
    )
    return figure("event_to_list", f"{devices:,}", "ms", samples[0], samples[1], _MKNOD, samples[2])


def tokens_to_list(tokens: int, events: int) -> Figure:
    """The one node of many tokens comes and goes."""

    def agent_in(home: Path) -> Agent:
        agent = Agent(home, [Offer(resource_names(1)[0], "/dev/bench", count=tokens)])
        agent.make_node("bench", 0)
        return agent

    agent, baseline = in_turn_with_baseline(
        agent_in, partial(comes_and_goes, name="bench", minor=0, devices=tokens), tokens, "all", events
    )
    return figure("tokens_to_list", f"{tokens:,}", "ms", agent, baseline, _TOKENS)


def uevent_to_list(devices: int, events: int) -> Figure:
    """Kernel events, injected in a network namespace of its own; inotify has nothing to see."""
    samples = hermetic.call(f"{__name__}:_uevents", devices, events, timeout=60 + events)
    return figure("event_to_list", f"{devices:,} (uevent)", "ms", samples[0], samples[1], _UEVENT, samples[2])


def _uevents(devices: int, events: int) -> Samples:
    moves_last = partial(moves, devices=devices)
    return in_turn_with_baseline(partial(many_nodes, devices=devices), moves_last, devices, "numa", events, moves_last)


def comes_and_goes(process: OnNodes, name: str, minor: int, devices: int) -> Side:
    present = [True]

    def cause() -> None:
        present[0] = not present[0]
        if present[0]:
            process.make_node(name, minor)
        else:
            process.node(name).unlink()

    return Side(Kubelet(process.plugin_dir), cause, partial(_check, devices))


def moves(process: OnNodes, devices: int) -> Side:
    name, injector = device_names(devices)[-1], hermetic.Injector()
    numa_node = process.numa_node(devices - 1)
    numa_node.parent.mkdir(parents=True)

    def prepare() -> None:
        numa_node.write_text("-1" if numa_node.exists() and numa_node.read_text() == "1" else "1")

    def cause() -> None:
        injector.kernel("add", f"/devices/virtual/bench/{name}", "bench", DEVNAME=name)

    return Side(Kubelet(process.plugin_dir), cause, partial(_check, devices), prepare)


def in_turn_with_baseline(
    agent_in: Callable[[Path], Agent],
    side_of: Callable[[Agent], Side],
    devices: int,
    change: str,
    events: int,
    bare_side_of: Callable[[OnNodes], Side] | None = None,
) -> Samples:
    """Have the agent and a baseline of as many devices meet their events in turn; `change` is the baseline's.

    With `bare_side_of` the plugin on bare grpclib takes part, and hears of its events as the agent does.
    """
    with tempfile.TemporaryDirectory() as home, ExitStack() as running:
        agent, baseline = agent_in(Path(home, "a")), Baseline(Path(home, "b"), 1, devices, change)
        sides = [side_of(agent), Side(Kubelet(baseline.plugin_dir), baseline.change, partial(_check, devices))]
        processes: list[Process] = [agent, baseline]
        if bare_side_of is not None:
            bare = Bare(Path(home, "c"), 1, devices)
            processes.append(bare)
            sides.append(bare_side_of(bare))
        for process, side in zip(processes, sides, strict=True):
            running.enter_context(running_with(process, side.kubelet))
        return in_turn(sides, events)


@contextmanager
def running_with(process: Process, kubelet: Kubelet) -> Iterator[None]:
    """Until it is registered and its first list has come."""
    kubelet.start()
    try:
        process.start()
        kubelet.await_registered(1)
        kubelet.lists.get(timeout=_WITHIN)
        time.sleep(_SETTLE)
        yield
    finally:
        process.stop()
        kubelet.stop()


def in_turn(sides: Sequence[Side], events: int) -> Samples:
    samples: Samples = [[] for _ in sides]
    parse = messages.load().ListAndWatchResponse.FromString
    for event in range(events):
        for side, taken in zip(sides, samples, strict=True):
            forget(side.kubelet)
            side.prepare()
            before = time.perf_counter()
            side.cause()
            arrival = side.kubelet.lists.get(timeout=_WITHIN)
            taken.append((arrival.at - before) * 1e3)
            side.check(parse(arrival.data), event)
            time.sleep(_GAP)
    return samples


def forget(kubelet: Kubelet) -> None:
    """Lists that had another cause."""
    while True:
        try:
            kubelet.lists.get_nowait()
        except queue.Empty:
            return


def _check(devices: int, found: Any, event: int) -> None:
    """Raises unless the list shows that devices went or changed NUMA node or, at odd events, that this is undone."""
    ids = {device.id for device in found.devices if not device.HasField("topology")}
    every = set(device_names(devices))
    if (ids == every) is not (event % 2 == 1) or not ids <= every:
        raise RuntimeError(f"the list shows {len(ids)} devices as they were, of {devices}: it is not about the event")
