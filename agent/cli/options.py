"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

config: Final = click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The configuration; by default /etc/fairlead/config.toml, and KubeVirt's devices where that is missing.",
)
"""`config: Path | None`, as `agent.config.load` takes it."""

as_json: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
"""`as_json: bool`."""
