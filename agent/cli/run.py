"""`fairlead run`: the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.cli import options

if TYPE_CHECKING:
    from agent.runtime import logs


@click.command(epilog="Exit codes: 0 it was stopped by SIGTERM or SIGINT, 2 the configuration has mistakes.")
@options.config
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
def run(config: Path | None, log_level: logs.Level) -> None:
    """Find hardware, offer it to the kubelet, hand it to pods."""
    # `--help` does without the daemon, which takes half a second to be imported
    from agent.runtime import garbage, logs  # logs is before all else that imports structlog: see there
    from agent.runtime.supervision.resource_shortage import Shortage, raise_limits

    garbage.put_off()
    raise_limits()

    import asyncio
    import faulthandler
    import sys

    import anyio

    from agent.config import load
    from agent.daemon.reporting.event_log import Events
    from agent.daemon.supervisor import Agent
    from agent.discovery.backend_factory import make_backends
    from agent.runtime.line_queue import QueuedLines
    from agent.runtime.supervision.notify import Notifier

    stderr = QueuedLines(sys.stderr.fileno())
    stderr.when_room = _tell_of_lost
    events = Events(lost=lambda: stderr.lost)
    logs.set_up(log_level, stderr, note=events.note)
    faulthandler.enable()  # systemd's watchdog ends us with SIGABRT: the journal then shows where the loop hung
    loaded = load(config)

    async def main() -> None:
        agent = Agent(loaded, make_backends(loaded.host, loaded.resources), Notifier.from_environment(), events)
        asyncio.get_running_loop().set_exception_handler(Shortage(agent.problems).handle)
        agent.counts.lost_lines = events.lost
        await agent.run_until_signal()

    try:
        anyio.run(main)
    finally:
        stderr.close()


def _tell_of_lost(count: int) -> None:
    import structlog

    log = structlog.get_logger()
    log.warning("log-lines-lost", count=count, reason="stderr took no more lines for a while")
