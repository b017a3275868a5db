"""`fairlead reload`, `handover` and `probe`: the daemon reads its file again, gives its place to a new one, says how it is."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli import commands, connection, output
from agent.console import sockets
from agent.console.control import Client
from agent.console.views import Reloaded
from agent.runtime.errors import ExitCode

_PATIENCE = 60.0  # seconds for a new daemon, which looks at all hardware first


@click.command(epilog="Exit codes: 0 done, 1 no daemon answers, or the configuration has mistakes and nothing changed.")
@connection.config
@commands.as_json
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
@commands.as_json
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


@click.command(epilog="Exit codes: 0 it is, 1 it is not, or no daemon answers.")
@click.argument("what", metavar="live|ready", type=click.Choice(sockets.PROBES))
@connection.config
def probe(what: str, config: Path | None) -> None:
    """Ask the daemon that runs here for its liveness or readiness.

    It is meant for the probes of a pod: it asks a unix socket that only root can use, and takes a tenth of a second.
    `live`: the daemon itself works. `ready`: the kubelet has every resource, or this daemon stands by. No state of a
    device changes either. It asks the daemon in the same container (PID namespace) as itself.
    """
    is_well, sentence = sockets.probe(what, config)
    output.echo(sentence)
    if not is_well:
        raise click.exceptions.Exit(ExitCode.TROUBLE)
