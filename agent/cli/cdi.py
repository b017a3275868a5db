"""`fairlead cdi clean`: remove what container runtimes were told."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from agent.cli import commands, output


@click.command(epilog="Exit codes: 0 done, 1 a daemon runs or one cannot be removed, 2 the configuration has mistakes.")
@click.argument("action", type=click.Choice(["clean"]))
@commands.config
@commands.as_json
def cdi(action: str, config: Path | None, as_json: bool) -> None:  # noqa: ARG001  # there is but one
    """Remove the CDI specifications that Fairlead has written, once it is uninstalled.

    A daemon that ends leaves them, because pods outlive it: a container that is created again is made from them. Nothing
    else is removed. With --json it prints {"removed": [FILE]}.
    """
    from agent.cdi import spec
    from agent.cdi.directory import Directory
    from agent.config import load
    from agent.kubelet.lock import holder
    from agent.runtime.errors import FairleadError, words
    from agent.runtime.limits import SOCKET_DIRECTORY

    loaded = load(config)
    try:
        with suppress(FileNotFoundError):  # of a lock
            if pid := holder(loaded.agent.plugin_dir / SOCKET_DIRECTORY / "lock"):
                raise FairleadError(f"process {pid} serves this node and would write them again; end it first")
        directory = Directory(loaded.host, loaded.agent.state_dir)
        removed = [spec.file(it).text for it in sorted(directory.recorded()) if directory.remove(it)]
    except OSError as error:
        raise FairleadError(f"the specifications cannot be removed: {words(error)}") from error
    if as_json:
        output.echo_json({"removed": removed})
    else:
        output.echo("\n".join(f"Removed {path}." for path in removed) or "There are none of Fairlead's.")
