"""`fairlead completion`: a shell's completion script; for bash one that knows words with colons, as PCI addresses have.

bash takes such a word for several (COMP_WORDBREAKS), and puts what it is answered in the place of the last of them alone.
click knows nothing of that.
"""

from __future__ import annotations

import os

import click
from click.shell_completion import BashComplete, add_completion_class, get_completion_class, split_arg_string

_SOURCE = """\
%(complete_func)s() {
    local line=${COMP_LINE:0:COMP_POINT} type value
    local word=${line##*[[:space:]]} before=
    [[ $COMP_WORDBREAKS == *:* && $word == *:* ]] && before=${word%%:*}:
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$before"}") ;;
        esac
    done < <(COMP_WORDS=$line %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@add_completion_class
class ColonsComplete(BashComplete):
    """Completion for bash, which is told the whole line and splits it itself."""

    source_template = _SOURCE

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the last, and the last, of a line up to the cursor."""
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)
        last = words.pop() if words and not line[-1:].isspace() else ""
        return words[1:], last


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
