"""`fairlead events`: what happened, and what happens."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli import commands, connection, output
from agent.console.control import Client
from agent.console.views import Event


@click.command(epilog="Exit codes: 0 done, 1 no daemon answers.")
@connection.config
@click.option("--follow", "-f", is_flag=True, help="Go on until interrupted, or until the daemon ends.")
@click.option("--last", "-n", type=click.IntRange(0, 1000), default=50, show_default=True, help="How many of the past.")
@commands.as_json
def events(config: Path | None, follow: bool, last: int, as_json: bool) -> None:
    """Show what changed: devices, registrations, allocations, the configuration.

    With --json each is a document of its own: {"number", "time", "kind", "resource", "device", "state", "reason",
    "message", "name"}.
    """

    async def question(client: Client) -> None:
        async for event in client.watch(last, follow=follow):
            output.echo_json(event) if as_json else output.echo(line(event))

    connection.ask(config, question)


def line(event: Event) -> str:
    """An event on one line, as far as it goes."""
    device = output.with_ids(event.name, (event.device,) if event.device else ())
    about = " ".join(part for part in (event.resource, device) if part)
    state = output.state(event.condition) if event.state else ""
    said = ": ".join(part for part in (event.reason, event.message) if part)
    return "  ".join(part for part in (output.moment(event.time), event.kind, about, state, said) if part)
