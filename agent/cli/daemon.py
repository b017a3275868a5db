"""Starts the daemon: what is set up before the rest is imported, which takes half a second on a slow machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.runtime import logs


def run(config: Path | None, log_level: logs.Level) -> None:
    """Run the daemon until SIGTERM or SIGINT.

    Raises:
        FairleadError: the configuration has mistakes.
    """
    from agent.runtime import process

    process.put_off_tls()
    process.use_one_heap()
    process.put_off_collecting()

    from agent.runtime import logs  # before all else that imports structlog: see there

    process.raise_limits()

    import asyncio
    import faulthandler
    import sys

    import anyio

    from agent.config import load
    from agent.daemon.reporting.event_log import Events
    from agent.daemon.supervisor import Agent
    from agent.discovery.backend_answers import make_backends
    from agent.runtime.logs import QueuedLines
    from agent.runtime.watchdog import Notifier

    stderr = QueuedLines(sys.stderr.fileno())
    stderr.when_room = _tell_of_lost
    events = Events(lost=lambda: stderr.lost)
    logs.set_up(log_level, stderr, note=events.note)
    faulthandler.enable()  # systemd's watchdog ends us with SIGABRT: the journal then shows where the loop hung
    loaded = load(config)

    async def main() -> None:
        agent = Agent(loaded, make_backends(loaded.host, loaded.resources), Notifier.from_environment(), events)
        asyncio.get_running_loop().set_exception_handler(process.Shortage(agent.problems).handle)
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
