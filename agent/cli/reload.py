"""`fairlead reload` and `fairlead handover`: have the daemon read its configuration again, or a new one take its place."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli import connection, options, output
from agent.console.client import Client
from agent.console.views import Reloaded

_PATIENCE = 60.0  # seconds for a new daemon, which looks at all hardware first


@click.command(epilog="Exit codes: 0 done, 1 no daemon answers, or the configuration has mistakes and nothing changed.")
@connection.config
@options.as_json
def reload(config: Path | None, as_json: bool) -> None:
    """Have the daemon read its configuration again and apply what changed.

    With --json it prints {"added", "removed", "changed", "needs_restart"}.
    """
    done = connection.ask(config, Client.reload)
    if as_json:
        output.echo_json(done)
        return
    for what, names in (("Added", done.added), ("Removed", done.removed), ("Changed", done.changed)):
        if names:
            output.echo(f"{what}: {', '.join(names)}")
    if done.needs_restart:
        output.echo(f"Only a restart applies: {', '.join(done.needs_restart)}")
    if done == Reloaded():
        since = connection.ask(config, Client.status).configuration.loaded
        output.echo(f"Nothing has changed: what the file says is in force since {output.moment(since)}.")


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
