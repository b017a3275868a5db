"""Events that come close together: `second_event`, `steady_cpu`, `storm_cpu`, `storm_to_list`, `storm_allocate`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import messages
from bench.figures import Figure, figure
from bench.kubelet import Kubelet
from bench.measures.allocate import METHOD as ALLOCATE
from bench.measures.allocate import request
from bench.measures.idle import cpu_seconds
from bench.measures.lists import comes_and_goes, forget, moves, running_with
from bench.names import device_names, resource_names
from bench.processes import Bare, Baseline, OnNodes, Process, many_nodes
from tests.e2e import hermetic

_DEVICES: Final = 8
_WITHIN: Final = 10.0  # seconds
_REST: Final = 0.3  # seconds, in which credit for lists is earned again
_STEADY: Final = 1_000  # events a second
_STORM: Final = 10_000
_ALLOCATES_EVERY: Final = 0.1  # seconds

_SECOND: Final = (
    "from before the second mknod or unlink, so long after that of another node, until the list that shows both is in the "
    "kubelet; grpcio is handed both changes"
)
_STEADY_CPU: Final = (
    "CPU time of the process while `add` uevents of all its devices in turn, which change nothing, come one by one, and "
    "an Allocate of one of them ten times a second"
)
_STORM_CPU: Final = (
    "CPU time of the process until it has taken in so many such events, 10,000 a second, and the Allocates"
)
_STORM_LIST: Final = "from a change right after that storm until it is in the kubelet"
_STORM_ALLOCATE: Final = "round trip of such an Allocate during the storm; the ID is held from the first time on"


def second_event(milliseconds: int, rounds: int) -> Figure:
    """Two nodes come or go, one a little after the other."""
    with tempfile.TemporaryDirectory() as home, ExitStack() as running:
        agent, bare = many_nodes(Path(home, "a"), _DEVICES), Bare(Path(home, "c"), 1, _DEVICES)
        baseline = Baseline(Path(home, "b"), 1, _DEVICES)
        plays = [pair(agent), (Kubelet(baseline.plugin_dir), (baseline.change,) * 2, lambda _: _DEVICES), pair(bare)]
        processes: list[Process] = [agent, baseline, bare]
        for process, (kubelet, _, _) in zip(processes, plays, strict=True):
            running.enter_context(running_with(process, kubelet))
        samples = second_events(plays, milliseconds / 1e3, rounds)
    return figure("second_event", f"{milliseconds} ms later", "ms", samples[0], samples[1], _SECOND, samples[2])


def second_events(plays: Sequence[Play], pause: float, rounds: int) -> list[list[float]]:
    """Have each meet its two events, in turn."""
    samples: list[list[float]] = [[] for _ in plays]
    for number in range(rounds):
        for (kubelet, causes, listed), taken in zip(plays, samples, strict=True):
            taken.append(_second(kubelet, causes, listed(number), pause))
            time.sleep(_REST)
    return samples


Play = tuple[Kubelet, Sequence[Callable[[], None]], Callable[[int], int]]
"""Where lists arrive, the two events, and how many devices are listed after both in that round."""


def pair(process: OnNodes) -> Play:
    """Two nodes of this process that come and go."""
    kubelet = Kubelet(process.plugin_dir)
    causes = [comes_and_goes(process, device_names(_DEVICES)[n], n, _DEVICES).cause for n in (0, 1)]
    return kubelet, causes, lambda number: _DEVICES - (0 if number % 2 else 2)


def _second(kubelet: Kubelet, causes: Sequence[Callable[[], None]], devices: int, pause: float) -> float:
    forget(kubelet)
    causes[0]()
    time.sleep(pause)
    before = time.perf_counter()
    causes[1]()
    while True:
        arrival = kubelet.lists.get(timeout=_WITHIN)
        if arrival.at > before and _count(arrival.data) == devices:
            return (arrival.at - before) * 1e3


def _count(data: bytes) -> int:
    pb: Any = messages.load()
    return len(pb.ListAndWatchResponse.FromString(data).devices)


def storms(devices: int, seconds: float) -> list[Figure]:
    """Uevents at two rates, in a network namespace of its own; agent and bare plugin one after the other."""
    found = hermetic.call(f"{__name__}:_storms", devices, seconds, timeout=300 + 20 * seconds)
    size = "" if devices == _DEVICES else f", {devices:,} devices"
    steady, storm = f"{_STEADY:,} uevents/s{size}", f"{seconds * _STORM:,.0f} uevents{size}"
    figures = [
        ("steady_cpu", steady, "%", _STEADY_CPU),
        ("storm_cpu", storm, "s", _STORM_CPU),
        ("storm_to_list", storm, "ms", _STORM_LIST),
        ("storm_allocate", storm, "ms", _STORM_ALLOCATE),
    ]
    return [
        figure(name, size, unit, agent, [0.0], how, bare)
        for (name, size, unit, how), (agent, bare) in zip(figures, found, strict=True)
    ]


def _storms(devices: int, seconds: float) -> list[list[list[float]]]:
    return storms_of([partial(many_nodes, devices=devices), lambda home: Bare(home, 1, devices)], seconds, devices)


def storms_of(
    makes: Sequence[Callable[[Path], OnNodes]], seconds: float, devices: int = _DEVICES
) -> list[list[list[float]]]:
    """CPU share while they are steady, and of a storm CPU seconds, how long what follows takes, and Allocates; of each process."""
    found: list[list[list[float]]] = [[], [], [], []]
    for make in makes:
        with tempfile.TemporaryDirectory() as home:
            process = make(Path(home, "a"))
            side = moves(process, devices)
            with running_with(process, side.kubelet):
                used = cpu_seconds(process.pid)
                _inject(side.kubelet, devices, _STEADY, seconds)
                found[0].append([(cpu_seconds(process.pid) - used) / seconds * 100])
                used = cpu_seconds(process.pid)
                allocated = _inject(side.kubelet, devices, _STORM, seconds)
                side.prepare()
                forget(side.kubelet)
                before = time.perf_counter()
                side.cause()
                arrival = side.kubelet.lists.get(timeout=_WITHIN)
                found[2].append([(arrival.at - before) * 1e3])
                time.sleep(_REST)
                found[1].append([cpu_seconds(process.pid) - used])
                found[3].append(allocated)
    return found


def _inject(kubelet: Kubelet, devices: int, rate: int, seconds: float) -> list[float]:
    """So many events a second, as evenly as a sleep of a millisecond allows; the milliseconds of Allocates meanwhile."""
    injector, names = hermetic.Injector(), device_names(devices)
    allocate, taken = kubelet.channel(resource_names(1)[0]).unary_unary(ALLOCATE), list[float]()
    asked = request(names[0])  # the first of them stays
    began, sent = time.perf_counter(), 0
    while sent < rate * seconds:
        due = min(rate * seconds, (time.perf_counter() - began) * rate)
        while sent < due:
            name = names[sent % devices]
            injector.kernel("add", f"/devices/virtual/bench/{name}", "bench", DEVNAME=name)
            sent += 1
        if time.perf_counter() - began >= len(taken) * _ALLOCATES_EVERY:
            before = time.perf_counter()
            allocate(asked)
            taken.append((time.perf_counter() - before) * 1e3)
        time.sleep(0.0005)
    return taken
