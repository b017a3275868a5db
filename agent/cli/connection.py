"""Asks the daemon for a command: finds its socket, and turns failures into sentences."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from agent.console.client import PATIENCE, Client, NoDaemonError
from agent.runtime.errors import words
from backends.linux import files

_DEFAULT: Final = Path("/run/fairlead/admin.sock")
_CONFIG: Final = Path("/etc/fairlead/config.toml")
_CONFIG_BYTES: Final = 4 << 20

_Answer = TypeVar("_Answer")

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
    socket, unread = _configured(config)

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


def admin_socket(config: Path | None) -> Path:
    """Where the daemon is reached."""
    return _configured(config)[0]


def _configured(config: Path | None) -> tuple[Path, str]:
    """Where the daemon is reached, and why the configuration does not say so, if it might; else empty.

    It is not loaded as a whole: that takes as long as all the rest, and a daemon runs on with an earlier one.
    """
    file = config or _CONFIG
    try:
        tables: dict[str, Any] = tomllib.loads(files.read(file, _CONFIG_BYTES).decode())
        return Path(tables["agent"]["admin_socket"]), ""
    except FileNotFoundError:
        return _DEFAULT, f"there is no {file}" if config else ""
    except (OSError, ValueError) as error:
        return _DEFAULT, f"{file} cannot be read ({words(error)})"
    except (KeyError, TypeError):  # it has no such key
        return _DEFAULT, ""
