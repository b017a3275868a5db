"""`fairlead undrain`: put a device back into service."""

from __future__ import annotations

from pathlib import Path

import click

from agent.cli import connection, options, output
from agent.runtime.errors import some


@click.command(epilog="Exit codes: 0 done, 1 no daemon answers, 2 there is no such device.")
@connection.device
@connection.config
@options.as_json
def undrain(device: str, config: Path | None, as_json: bool) -> None:
    """Offer DEVICE again: ends its drain, its quarantine, and what waits for an operator, such as an XID.

    What is wrong with it now keeps it Unhealthy all the same. With --json it prints {"ids", "ended", "name"}.
    """
    back = connection.ask(config, lambda client: client.undrain(device))
    ids = output.with_ids(back.name, back.ids or (device,))
    if as_json:
        output.echo_json(back)
    elif back.ended:
        output.echo(f"Back in service: {ids} (ended: {some(back.ended, output.NAMED)}).")
    else:
        output.echo(
            f"Nothing has ended: no drain, and nothing else that an operator can end, keeps {ids} out of service."
        )
