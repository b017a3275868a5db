"""`python -m agent.simulation --root DIR`: a simulated kubelet that prints one JSON line for each change."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import anyio
import msgspec

from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Change, Container, Kind, Pod, Version
from agent.simulation.registration import Handler

_UNTOLD = (Kind.CHECKPOINT,)  # follows every list


def line(change: Change) -> str:
    """One change as JSON; empty parts are left out."""
    numbers = {"capacity": change.after.capacity, "allocatable": change.after.allocatable} if change.after else {}
    words = {"resource": change.resource, "text": change.text, "devices": change.devices()}
    return msgspec.json.encode(
        {"change": change.kind, "at": change.at} | {k: v for k, v in words.items() if v} | numbers
    ).decode()


def _print(change: Change) -> None:
    if change.kind not in _UNTOLD:
        print(line(change), flush=True)


def pod(text: str) -> Pod:
    """The pod that NAME=RESOURCE:NUMBER means.

    Raises:
        ValueError: it means none.
    """
    name, _, asked = text.partition("=")
    resource, _, number = asked.rpartition(":")
    if not (name and resource):
        raise ValueError(text)
    return Pod(name, (Container("main", {resource: int(number)}),))


async def _admit(kubelet: Kubelet, wanted: Pod) -> None:
    """Admit the pod once there is what it asks for."""
    ((resource, number),) = wanted.containers[0].resources.items()
    await kubelet.wait_for(lambda k: resource in k.resources and k.resources[resource].allocatable >= number, math.inf)
    await kubelet.admit(wanted)


async def simulate(kubelet: Kubelet, seconds: float | None, pods: Sequence[Pod]) -> None:
    """Run it until SIGTERM, SIGINT, or the time is over."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    if seconds is not None:
        loop.call_later(seconds, over.set)
    kubelet.subscribe(_print)
    async with kubelet, anyio.create_task_group() as tasks:
        for wanted in pods:
            tasks.start_soon(_admit, kubelet, wanted)
        await over.wait()
        tasks.cancel_scope.cancel()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m agent.simulation", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the kubelet's root directory; it is made if missing")
    parser.add_argument("--seconds", type=float, help="end after so many seconds")
    of_pod = "a pod that runs once there is what it asks for, until the kubelet ends; may be repeated"
    of_kubelet = "behave as this kubelet or, with 1.37, as those after it (default: %(default)s)"
    parser.add_argument("--kubelet", choices=get_args(Version), default="1.36", help=of_kubelet)
    of_handler = "what a kubelet of 1.37 does with a Register at a path that is connected (default: %(default)s)"
    parser.add_argument("--handler", choices=get_args(Handler), default="all", help=of_handler)
    parser.add_argument("--pod", type=pod, action="append", default=[], metavar="NAME=RESOURCE:NUMBER", help=of_pod)
    arguments = parser.parse_args()
    try:
        kubelet = Kubelet(arguments.root, version=arguments.kubelet, handler=arguments.handler)
        asyncio.run(simulate(kubelet, arguments.seconds, arguments.pod))
    except OSError as error:
        print(f"cannot serve in {arguments.root}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
