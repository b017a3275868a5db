"""`fairlead reload`: have the daemon read its configuration again."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli import connection, options, output
from agent.console.client import Client
from agent.console.views import Reloaded


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
