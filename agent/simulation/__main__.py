"""`python -m agent.simulation --root DIR`: a simulated kubelet that prints one JSON line for each change."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import msgspec

from agent.simulation.changes import Change, Kind
from agent.simulation.kubelet import Kubelet

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


async def simulate(root: Path, seconds: float | None) -> None:
    """Run until SIGTERM, SIGINT, or the time is over."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    if seconds is not None:
        loop.call_later(seconds, over.set)
    kubelet = Kubelet(root)
    kubelet.subscribe(_print)
    async with kubelet:
        await over.wait()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m agent.simulation", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="the kubelet's root directory; it is made if missing")
    parser.add_argument("--seconds", type=float, help="end after so many seconds")
    arguments = parser.parse_args()
    try:
        asyncio.run(simulate(arguments.root, arguments.seconds))
    except OSError as error:
        print(f"cannot serve in {arguments.root}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
