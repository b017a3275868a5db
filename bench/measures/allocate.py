"""Allocate of four nodes and two variables: `allocate`, `allocate_concurrent`.

Every ID is asked for once, as a kubelet does, and an agent gives out no more of them than a node has pods: the
state that it keeps grows with its claims. Then another agent takes its place.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench import messages
from bench.figures import Figure, figure
from bench.kubelet import Kubelet
from bench.names import device_names, resource_names
from bench.processes import Agent, Bare, Baseline, Offer, Process

_PODS: Final = 110  # of a node, at most, as the kubelet comes (maxPods)
AT_ONCE: Final = 32
_WARM_UP: Final = 10  # calls that are not counted
_PAUSE: Final = 0.005  # seconds between calls
_SETTLE: Final = 0.3  # seconds after the first list, for a start to be over
_METHOD: Final = "/v1beta1.DevicePlugin/Allocate"

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


def request(device_id: str) -> bytes:
    pb: Any = messages.load()
    container = pb.ContainerAllocateRequest(device_ids=[device_id])
    data: bytes = pb.AllocateRequest(container_requests=[container]).SerializeToString()
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
    call, taken = channel.unary_unary(_METHOD), []
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

    calls = [channel.unary_unary(_METHOD, None, partial(arrived, number)) for number in range(len(requests))]
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
