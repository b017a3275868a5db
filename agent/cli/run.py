"""`fairlead run`: the daemon, as click reads its options; as a unit writes them, click is not asked (`agent.cli.main`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.cli import LEVELS, daemon, options

if TYPE_CHECKING:
    from agent.runtime import logs


@click.command(epilog="Exit codes: 0 it was stopped by SIGTERM or SIGINT, 2 the configuration has mistakes.")
@options.config
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
def run(config: Path | None, log_level: logs.Level) -> None:
    """Find hardware, offer it to the kubelet, hand it to pods."""
    daemon.run(config, log_level)
