"""`fairlead import`: another device plugin's configuration as ours, and what could not be carried over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from agent.cli.import_options import arguments, imported_from, say
from agent.runtime.errors import ExitCode


@click.command(
    "import",
    epilog="Exit codes: 0 everything was carried over, 1 something was lost, 2 the file cannot be read or recognised.",
)
@arguments
def import_(files: tuple[Path, ...], **how: Any) -> None:
    """Turn another plugin's configuration into Fairlead's.

    A FILE is the configuration, a ConfigMap or Helm values that have it, or the DaemonSet whose arguments and environment
    count, too; several together are one import. It prints TOML (`fairlead import old.yaml > config.toml`), and on the
    standard error, as FILE:LINE: sentence, what could not be carried over and why.
    """
    imported = imported_from(files, **how)
    click.echo(imported.toml.encode(), nl=False)
    say(imported)
    if not imported.lossless:
        raise click.exceptions.Exit(ExitCode.TROUBLE)
