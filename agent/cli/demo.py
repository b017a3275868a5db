"""`fairlead demo`: the agent against a simulated kubelet, with devices that come and go, and how long each took."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import anyio
import click
import msgspec

from agent import logs
from agent.cli import options
from agent.config import load
from agent.devices.making import make_backends
from agent.errors import FairleadError
from agent.notify import Notifier
from agent.simulation.hardware import LoopDevice, write_stub_file
from agent.simulation.kubelet import Kubelet
from agent.simulation.pods import Container, Pod
from agent.simulation.stage import Outcome, Stage, view
from agent.supervisor import Agent

if TYPE_CHECKING:
    from rich.live import Live

KVM: Final = "devices.kubevirt.io/kvm"
LOOP: Final = "demo.fairlead/loop"
STUB: Final = "demo.fairlead/stub"

_PAUSE: Final = 1.0  # seconds between two acts
_START: Final = 10.0  # seconds for the resources to be registered

_CONFIG: Final = """\
[agent]
plugin_dir = "{root}/device-plugins"
kubelet_root = "{root}"
state_dir = "{root}/state"

[[resource]]
name = "devices.kubevirt.io/kvm"
backend = "chardev"
paths = [{{ path = "/dev/kvm" }}]
count = 1000

[[resource]]
name = "demo.fairlead/loop"
backend = "chardev"
paths = [{{ path = "/dev/loop[0-9]*" }}]

[[resource]]
name = "demo.fairlead/stub"
backend = "stub"
devices = 2
file = "{root}/hardware/stub"
"""


@click.command(epilog="Exit codes: 0 done, 1 the agent did not register or a change never reached the kubelet.")
@click.option("--seconds", type=click.FloatRange(min=0), help="End after so long; by default with Ctrl-C.")
@options.as_json
def demo(seconds: float | None, as_json: bool) -> None:
    """Run against a simulated kubelet and watch devices come and go.

    Nothing outside a temporary directory is touched, except one loop device, made and removed again, if you are root.

    With --json it prints {"resources": [{"name", "capacity", "allocatable"}], "changes": [{"resource", "device",
    "health", "latency_ms", "kernel_ms"}]} at the end, after 10 seconds if --seconds does not say otherwise.
    """
    logs.set_up("error")
    if as_json and seconds is None:
        seconds = 10.0
    with TemporaryDirectory(prefix="fairlead-demo-") as directory:
        show = Show(live=not as_json)
        try:
            anyio.run(partial(_demo, Path(directory), seconds, show))
        except KeyboardInterrupt:
            pass
        if as_json:
            click.echo(msgspec.json.encode(show.document()))
    if show.missed:
        raise FairleadError(f"{show.missed} changes never reached the kubelet")
