"""Offers a shell the names of a running daemon's devices, for the commands that take one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import click
from click.shell_completion import CompletionItem

from agent.cli import connection
from agent.console.client import Client
from agent.console.views import Status
from agent.runtime.errors import FairleadError

_PATIENCE: Final = 2.0  # seconds: a person has pressed Tab and waits


def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """IDs, and what is not offered, that begin so; nothing where no daemon answers."""
    with suppress(FairleadError):
        status = connection.ask(ctx.params.get("config"), Client.status, _PATIENCE)
        return [CompletionItem(name, help=what) for name, what in _names(status) if name.startswith(incomplete)]
    return []


def _names(status: Status) -> Iterator[tuple[str, str]]:
    for resource in status.resources:
        for device in resource.devices:
            for name in device.ids:
                yield name, f"{resource.name}, {device.state}"
    for one in status.unclaimed:
        yield one.device, one.why


device: Final = click.argument("device", shell_complete=complete)
"""`device: str`."""
