"""`fairlead schema`: the configuration as a JSON Schema."""

from __future__ import annotations

import click
import msgspec


@click.command(epilog="Exit codes: 0 done.")
def schema() -> None:
    """Print the JSON Schema of the configuration, for editors that complete and check TOML.

    With Even Better TOML or taplo: save it beside the file and write "#:schema ./fairlead.schema.json" at its top.
    """
    from agent.config.schema import schema as made

    click.echo(msgspec.json.format(msgspec.json.encode(made()), indent=2))
