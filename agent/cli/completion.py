"""`fairlead completion`: a shell's completion script."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from agent.cli import bash_completion  # noqa: F401  # which makes click know it


@click.command(epilog="Exit codes: 0 done, 2 unknown shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what makes SHELL complete fairlead's commands and options.

    \b
    bash: fairlead completion bash > /etc/bash_completion.d/fairlead
    zsh:  fairlead completion zsh > "${fpath[1]}/_fairlead"
    fish: fairlead completion fish > ~/.config/fish/completions/fairlead.fish
    """  # noqa: D301  # click looks for the character
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "fairlead", "_FAIRLEAD_COMPLETE").source())
