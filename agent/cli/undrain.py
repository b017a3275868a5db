"""`fairlead undrain`: put a device back into service."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli import connection, devices, options, output
from agent.console.client import Client
from agent.runtime.errors import some


@click.command(epilog="Exit codes: 0 done, 1 no daemon answers, 2 there is no such device.")
@devices.device
@connection.config
@options.as_json
def undrain(device: str, config: Path | None, as_json: bool) -> None:
    """Offer DEVICE again: ends its drain, its quarantine, and what waits for an operator, such as an XID.

    What is wrong with it now keeps it Unhealthy all the same. With --json it prints {"ids", "ended"}.
    """

    async def question(client: Client) -> None:
        back = await client.undrain(device)
        if as_json:
            output.echo_json(back)
        elif back.ended:
            output.echo(
                f"Back in service: {some(back.ids, output.NAMED) or device} (ended: {some(back.ended, output.NAMED)})."
            )
        else:
            output.echo(
                f"Nothing that an operator can end keeps {some(back.ids, output.NAMED) or device} out of service."
            )

    connection.ask(config, question)
