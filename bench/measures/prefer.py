"""CPU from the bytes of a GetPreferredAllocation request to those of its reply, in this process: `prefer`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from agent.kubelet import wire
from agent.placement.choice import choose
from bench import messages
from bench.figures import Figure, figure, percentile
from tests.placement.machines import Machine, Slots, dgx2, mi250x

_HOW: Final = (
    "CPU of this thread from request to reply, for that number of devices which takes longest; "
    "baseline: protobuf reads the request and replies with the first ones"
)

_Side = Callable[[bytes], bytes]


def prefer_16(rounds: int) -> Figure:
    """1 to 15 of 16 GPUs with equal links, and of 16 with unequal ones."""
    return _worst("16", [dgx2(), mi250x()], 16, range(1, 16), rounds)


def prefer_1000(rounds: int) -> Figure:
    """Of 1,000 devices that are free among 1,200 at switches of 4: the switches differ."""
    slots = Slots()
    for number in range(300):
        slots.switch(4, number % 4)
    return _worst("1,000", [Machine(slots.found)], 1_000, (1, 2, 8, 100, 500, 750, 999), rounds)


def _worst(size: str, machines: Sequence[Machine], free: int, sizes: Sequence[int], rounds: int) -> Figure:
    found = [_samples(machine, free, wanted, rounds) for machine in machines for wanted in sizes]
    agent, baseline = max(found, key=lambda samples: percentile(samples[0], 0.50))
    return figure("prefer", size, "ms", agent, baseline, _HOW)


def _samples(machine: Machine, free: int, wanted: int, rounds: int) -> tuple[list[float], list[float]]:
    pb: Any = messages.load()
    available = random.Random(free).sample([device.key for device in machine.devices], free)
    wish = pb.ContainerPreferredAllocationRequest(available_ids=available, allocation_size=wanted)
    request = pb.PreferredAllocationRequest(container_requests=[wish]).SerializeToString()
    samples: tuple[list[float], list[float]] = [], []
    for _ in range(rounds):
        for side, taken in zip((_agent(machine), _baseline), samples, strict=True):
            before = time.thread_time()
            reply = side(request)
            taken.append((time.thread_time() - before) * 1e3)
            if len(pb.PreferredAllocationResponse.FromString(reply).container_responses[0].device_ids) != wanted:
                raise RuntimeError(f"the reply has not {wanted} devices")
    return samples


def _agent(machine: Machine) -> _Side:
    slots = machine.slots()

    def side(request: bytes) -> bytes:
        (wish,) = wire.read_preferred(request)
        return wire.encode_preferred(
            [choose(slots, machine.links, "spread", wish.available, wish.must_include, wish.size)]
        )

    return side


def _baseline(request: bytes) -> bytes:
    pb: Any = messages.load()
    (wish,) = pb.PreferredAllocationRequest.FromString(request).container_requests
    first = pb.ContainerPreferredAllocationResponse(device_ids=wish.available_ids[: wish.allocation_size])
    reply: bytes = pb.PreferredAllocationResponse(container_responses=[first]).SerializeToString()
    return reply
