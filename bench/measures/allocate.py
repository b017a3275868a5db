"""Allocate of four nodes and two variables: `allocate`, `allocate_concurrent`, `allocate_growth`.

Every ID is asked for once, as a kubelet does, and an agent gives out no more of them than a node has pods; then another
agent takes its place. How the time grows with what is held is measured by itself, and must not.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from bench import messages
from bench.figures import Figure, figure, percentile, slope
from bench.four_nodes import DEVICES
from bench.kubelet import Kubelet
from bench.names import device_names, resource_names
from bench.processes import Agent, Bare, Baseline, Offer, Process

_PODS: Final = 110  # of a node, at most, as the kubelet comes (maxPods)
AT_ONCE: Final = 32
HELD: Final = (8, 200, 2_000, 5_000)
"""Claims that there are while calls are measured."""

_REPLICAS: Final = 48  # of each device, so that there are IDs enough
_FILLED_AT_ONCE: Final = 100  # containers of one call
_WARM_UP: Final = 10  # calls that are not counted
_PAUSE: Final = 0.005  # seconds between calls
_SETTLE: Final = 0.3  # seconds after the first list, for a start to be over
METHOD: Final = "/v1beta1.DevicePlugin/Allocate"

_HOW: Final = "round trip of an Allocate of one fresh ID; baseline: the same reply, made beforehand"


def allocate(agents: int) -> Figure:
    """One after the other."""
    samples = round_trips(_processes, agents)
    return figure("allocate", "1", "ms", samples[0], samples[1], _HOW, samples[2])


def allocate_concurrent(agents: int) -> Figure:
    """Many at once."""
    samples = round_trips(_processes, agents, AT_ONCE)
    how = f"{_HOW}; {AT_ONCE} at a time"
    return figure("allocate_concurrent", f"{AT_ONCE}", "ms", samples[0], samples[1], how, samples[2])


def allocate_held(calls: int) -> Iterator[Figure]:
    """One after the other, while ever more is held; and how much longer each 1,000 claims make it."""
    sides = held_round_trips(
        lambda home: [shared(home / "a"), Baseline(home / "b", 1, 1), Bare(home / "c", 1, 1)], calls
    )
    for number, held in enumerate(HELD):
        yield figure("allocate", f"1, {held:,} held", "ms", *_beside([side[number] for side in sides], _HOW))
    how = (
        "what a round trip takes longer by its p50 for each 1,000 claims, the line of least squares through those sizes"
    )
    slopes = [[slope([held / 1_000 for held in HELD], [percentile(one, 0.5) for one in side])] for side in sides]
    yield figure("allocate_growth", "1,000 held more", "ms", *_beside(slopes, how))


def _beside(samples: Sequence[list[float]], how: str) -> tuple[list[float], list[float], str, list[float]]:
    agent, baseline, bare = samples
    return agent, baseline, how, bare


def held_round_trips(make: Callable[[Path], Sequence[Process]], calls: int) -> list[list[list[float]]]:
    """The milliseconds of so many calls of each process, with as much held as `HELD` says."""
    ids = iter([f"{name}::{replica}" for replica in range(_REPLICAS) for name in device_names(DEVICES)])
    with tempfile.TemporaryDirectory() as home, ExitStack() as running:
        sides = [running.enter_context(_connection(process)) for process in make(Path(home))]
        samples: list[list[list[float]]] = [[[] for _ in HELD] for _ in sides]
        there = 0
        for number, held in enumerate(HELD):
            while there < held:
                some = list(islice(ids, min(_FILLED_AT_ONCE, held - there)))
                there += len(some)
                for channel in sides:
                    channel.unary_unary(METHOD)(request(*some))
            for device_id in islice(ids, calls):
                there += 1
                for channel, taken in zip(sides, samples, strict=True):
                    taken[number] += [seconds * 1e3 for seconds in _one_by_one(channel, [request(device_id)])]
                time.sleep(_PAUSE)
    return samples


def round_trips(make: Callable[[Path], Sequence[Process]], agents: int, batch: int = 1) -> list[list[float]]:
    """The milliseconds of calls, so many at once, of each process; so many times anew."""
    samples: list[list[float]] = []
    for _ in range(agents):
        with tempfile.TemporaryDirectory() as home, ExitStack() as running:
            sides = [running.enter_context(_connection(process)) for process in make(Path(home))]
            samples = samples or [[] for _ in sides]
            requests = [request(name) for name in device_names(_WARM_UP + _PODS)]
            call = _one_by_one if batch == 1 else _at_once
            for channel in sides:
                _one_by_one(channel, requests[:_WARM_UP])
            for first in range(_WARM_UP, len(requests) - batch + 1, batch):
                for channel, taken in zip(sides, samples, strict=True):
                    taken += [seconds * 1e3 for seconds in call(channel, requests[first : first + batch])]
                    time.sleep(_PAUSE)
    return samples


def _processes(home: Path) -> list[Process]:
    return [one_resource(home / "a"), Baseline(home / "b", 1, 1), Bare(home / "c", 1, 1)]


def one_resource(home: Path, code: Path = messages.ROOT) -> Agent:
    """An agent with the devices that are asked for."""
    return Agent(home, [Offer(resource_names(1)[0])], code=code)


def shared(home: Path, code: Path = messages.ROOT) -> Agent:
    """An agent with as many IDs as `HELD` needs."""
    return Agent(home, [Offer(resource_names(1)[0], replicas=_REPLICAS)], code=code)


def request(*device_ids: str) -> bytes:
    """For containers with one of these IDs each."""
    pb: Any = messages.load()
    containers = [pb.ContainerAllocateRequest(device_ids=[it]) for it in device_ids]
    data: bytes = pb.AllocateRequest(container_requests=containers).SerializeToString()
    return data


@contextmanager
def _connection(process: Process) -> Iterator[Any]:
    """The kubelet's to this process, once it has registered and sent its list."""
    kubelet = Kubelet(process.plugin_dir)
    kubelet.start()
    try:
        process.start()
        kubelet.await_registered(1)
        kubelet.lists.get(timeout=10)
        time.sleep(_SETTLE)
        yield kubelet.channel(resource_names(1)[0])
    finally:
        process.stop()
        kubelet.stop()


def _one_by_one(channel: Any, requests: Sequence[bytes]) -> list[float]:
    call, taken = channel.unary_unary(METHOD), []
    for request in requests:
        before = time.perf_counter()
        reply = call(request)
        taken.append(time.perf_counter() - before)
        _check(reply)
    return taken


def _at_once(channel: Any, requests: Sequence[bytes]) -> list[float]:
    begun: dict[int, float] = {}
    ended: dict[int, float] = {}

    def arrived(number: int, reply: bytes) -> bytes:
        ended[number] = time.perf_counter()
        return reply

    calls = [channel.unary_unary(METHOD, None, partial(arrived, number)) for number in range(len(requests))]
    futures = []
    for number, (call, request) in enumerate(zip(calls, requests, strict=True)):
        begun[number] = time.perf_counter()
        futures.append(call.future(request))
    for future in futures:
        _check(future.result())
    return [ended[number] - begun[number] for number in begun]


def _check(reply: bytes) -> None:
    pb: Any = messages.load()
    (container,) = pb.AllocateResponse.FromString(reply).container_responses
    if (len(container.devices), len(container.envs)) != (4, 2):
        raise RuntimeError(f"an Allocate gave {len(container.devices)} nodes and {len(container.envs)} variables")
