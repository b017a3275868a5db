"""Asks the daemon for a command: finds its socket, and turns failures into sentences."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import click

from agent.console.client import PATIENCE, Client, NoDaemonError
from agent.console.sockets import configured
from agent.runtime.errors import FairleadError

_Answer = TypeVar("_Answer")
_TO_LOOK: Final = 5.0  # seconds; what looks by itself goes on without the daemon

config: Final = click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The daemon's configuration, which says where its admin socket is.",
)
"""`config: Path | None`, as `ask` takes it."""


def ask(config: Path | None, question: Callable[[Client], Awaitable[_Answer]], patience: float = PATIENCE) -> _Answer:
    """Ask the daemon something, and await an answer for so many seconds; Ctrl-C just ends it.

    Raises:
        FairleadError: with a sentence for the person who asked.
    """
    socket, unread = configured(config)

    async def main() -> _Answer:
        client = Client(socket, patience)
        try:
            return await question(client)
        finally:
            client.close()

    try:
        return asyncio.run(main())  # anyio, which the daemon runs on, would take 25 ms to be imported
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None
    except NoDaemonError as error:
        doubt = f"; {unread}, so that this is only where it is by default" if unread else ""
        raise NoDaemonError(f"{error.sentence}{doubt}; `fairlead doctor` says more") from error


def in_force(config: Path | None) -> tuple[Path | None, str | None]:
    """The file to look at, as `load` takes it, and the file of the daemon that answers: empty if it has none, None if none answers.

    What is named is looked at; else the daemon's own, unless that is of another mount namespace and not here.
    """
    try:
        its = ask(config, Client.status, _TO_LOOK).configuration.file
    except FairleadError:
        return config, None
    return config or (Path(its) if its and Path(its).is_file() else None), its


def admin_socket(config: Path | None) -> Path:
    """Where the daemon is reached."""
    return configured(config)[0]
