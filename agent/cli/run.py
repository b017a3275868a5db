"""`fairlead run`: the daemon."""

from __future__ import annotations

import asyncio
import faulthandler
from pathlib import Path

import anyio
import click

from agent import logs
from agent.cli import options
from agent.config import load
from agent.devices.making import make_backends
from agent.events import Events
from agent.notify import Notifier
from agent.runtime.shortage import Shortage
from agent.supervisor import Agent


@click.command(epilog="Exit codes: 0 it was stopped by SIGTERM or SIGINT, 2 the configuration has mistakes.")
@options.config
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def run(config: Path | None, log_level: logs.Level) -> None:
    """Find hardware, offer it to the kubelet, hand it to pods."""
    events = Events()
    logs.set_up(log_level, note=events.note)
    faulthandler.enable()  # systemd's watchdog ends us with SIGABRT: the journal then shows where the loop hung
    loaded = load(config)

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(Shortage().handle)
        agent = Agent(loaded, make_backends(loaded.host, loaded.resources), Notifier.from_environment(), events)
        await agent.run_until_signal()

    anyio.run(main)
