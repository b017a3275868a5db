"""CPU from a signal to the bytes of the list, in this process: `flip`."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from agent.health import HealthBook
from agent.health.causes import WINDOW
from agent.inventory.inventory import Inventory
from agent.kubelet.plugin import EncodedList
from backends.base import Device, Host, HostPath, Node, Resource, ResourceSpec, Signal, Verdict
from backends.chardev import CharDev, CharDevOptions, PathOption
from bench import messages
from bench.figures import Figure, figure

_NAME: Final = "bench.example/r0"
_HOW: Final = "CPU of this thread from a health signal to the encoded list; baseline: protobuf builds and encodes it"


def flip(path: str, devices: int, tokens: int, size: str, rounds: int) -> Figure:
    """One of the devices, with all its tokens, becomes unhealthy and healthy again."""
    agent, baseline = _agent(path, devices, tokens), _baseline(devices * tokens, tokens)
    samples: tuple[list[float], list[float]] = [], []
    for number in range(rounds):
        healthy = number % 2 == 1
        for side, taken in zip((agent, baseline), samples, strict=True):
            before = time.thread_time()
            data = side(healthy)
            taken.append((time.thread_time() - before) * 1e3)
            if data.count(b"Unhealthy") != (0 if healthy else tokens):
                raise RuntimeError("the encoded list does not show the flip")
    return figure("flip", size, "ms", *samples, _HOW)


def _agent(path: str, devices: int, tokens: int) -> Callable[[bool], bytes]:
    options = CharDevOptions([PathOption(path)], count=tokens)
    resource: Resource[CharDevOptions] = Resource(_NAME, ResourceSpec("chardev", options))
    inventory, health = Inventory([resource], {"chardev": CharDev(Host(), [resource])}), HealthBook()
    found = {name: (_device(name, n),) for n, name in enumerate(path.replace("*", str(n)) for n in range(devices))}
    inventory.update("chardev", found)
    inventory.ready("chardev")
    encoded = EncodedList()
    for snapshot in inventory.take():
        encoded.apply(snapshot)
    encoded.message()
    unit, (device,) = list(found.items())[-1]
    (flipping,) = device.hardware
    signal = Signal(flipping, "node-missing", Verdict.NOW, "it does not exist")

    rounds = count()

    def side(healthy: bool) -> bytes:
        now = next(rounds) * WINDOW  # as far apart as failures must be that are no flapping
        inventory.set_health(health.probed("chardev", {unit: [] if healthy else [signal]}, now))
        for snapshot in inventory.take():
            encoded.apply(snapshot)
        return encoded.message()

    return side


def _device(name: str, number: int) -> Device:
    return Device(
        key=name,
        unit=name,
        resource=_NAME,
        hardware=frozenset({f"node:c:240:{number}"}),
        identity=f"c:240:{number}",
        nodes=(Node(HostPath(name), name, "rw"),),
    )


def _baseline(slots: int, flipping: int) -> Callable[[bool], bytes]:
    pb: Any = messages.load()
    devices = {f"bench{n}": pb.Device(id=f"bench{n}", health="Healthy") for n in range(slots)}
    last = list(devices)[-flipping:]

    def side(healthy: bool) -> bytes:
        for device_id in last:
            devices[device_id].health = "Healthy" if healthy else "Unhealthy"
        data: bytes = pb.ListAndWatchResponse(devices=devices.values()).SerializeToString()
        return data

    return side
