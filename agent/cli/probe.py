"""`fairlead probe`: ask this container's daemon whether it is well, for the kubelet."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli import connection, output
from agent.console.sockets import PROBES
from agent.console.sockets import probe as ask
from agent.runtime.errors import ExitCode


@click.command(epilog="Exit codes: 0 it is, 1 it is not, or no daemon answers.")
@click.argument("what", metavar="live|ready", type=click.Choice(PROBES))
@connection.config
def probe(what: str, config: Path | None) -> None:
    """Ask the daemon that runs here for its liveness or readiness.

    It is meant for the probes of a pod: it asks a unix socket that only root can use, and takes a tenth of a second.
    `live`: the daemon itself works. `ready`: the kubelet has every resource, or this daemon stands by. No state of a
    device changes either. It asks the daemon in the same container (PID namespace) as itself.
    """
    is_well, sentence = ask(what, config)
    output.echo(sentence)
    if not is_well:
        raise click.exceptions.Exit(ExitCode.TROUBLE)
