"""`fairlead handover`: have a new daemon take the place of the one that runs."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli import connection, options, output
from agent.console.client import Client

_PATIENCE = 60.0  # seconds: the new one looks at all hardware first


@click.command(
    epilog="Exit codes: 0 a new process serves the node, 1 no daemon answers, or it could not be and the old one serves on."
)
@connection.config
@options.as_json
def handover(config: Path | None, as_json: bool) -> None:
    """Replace the running daemon with one of the installed version, without a gap.

    At no moment are the node's devices away, as they are for some tenths of a second in a restart: after a new version
    was installed, use this in place of `systemctl restart`. In a container the DaemonSet's update does it.

    With --json it prints {"standby"}: the new process and its version.
    """
    done = connection.ask(config, Client.hand_over, _PATIENCE)
    if as_json:
        output.echo_json(done)
    else:
        output.echo(f"Process {' of Fairlead '.join(done.standby.split())} serves the node now.")
