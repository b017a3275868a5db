"""`fairlead manual`, `completion` and `schema`: what commands and configuration are, as man, shells and editors read it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from inspect import cleandoc
from typing import Final

import click
from click.shell_completion import BashComplete, add_completion_class, get_completion_class, split_arg_string

from agent import __version__

_FILES = (
    ("/etc/fairlead/config.toml", "The configuration; `fairlead schema` describes it."),
    (
        "/var/lib/fairlead/state.json",
        "What outlives a restart: claims, drains, what was latched, what was offered, a day's history.",
    ),
    ("/run/fairlead/admin.sock", "Where the commands reach the daemon."),
)
EXAMPLES: Final = (
    ("Why does this node offer seven GPUs and not eight?", "fairlead status"),
    ("Each device on a line, kept up to date:", "fairlead devices --watch"),
    ("A whole configuration for what this machine has:", "fairlead suggest"),
    ("What is wrong with the node, and what mends it:", "fairlead doctor"),
    ("All that is known of one of them, offered, refused or gone:", "fairlead explain 0000:3b:00.0"),
    ("Who has what, kept up to date:", "fairlead status --pods --watch"),
    ("Who had it last night, and how was it then?", "fairlead status --history nvidia3"),
    (
        "Keep new pods from a GPU that is to be looked at, until tonight:",
        "fairlead drain nvidia3 -r 'ECC' --until 18:00",
    ),
    ("What happened in the last hours, and what happens:", "fairlead events --last 200 --follow"),
    ("Before a configuration is put in force:", "fairlead validate new.toml"),
    ("What it would offer on this node, without a daemon:", "fairlead discover --config new.toml"),
    ("In place of generic-device-plugin:", "fairlead import --from generic devices.yaml"),
    ("Before another plugin is taken off a node:", "fairlead migrate configmap.yaml daemonset.yaml"),
)
"""For what, and how."""


@click.command(epilog="Exit codes: 0 done.")
@click.pass_context
def manual(ctx: click.Context) -> None:
    """Print the man page: fairlead manual > /usr/local/share/man/man8/fairlead.8."""
    root = ctx.find_root()
    assert isinstance(root.command, click.Group)
    click.echo("\n".join(_page(root, root.command)))


def _page(root: click.Context, group: click.Group) -> Iterator[str]:
    yield f'.TH FAIRLEAD 8 "" "fairlead {__version__}" "System Administration"'
    yield from (".SH NAME", r"fairlead \- offer a node's hardware to Kubernetes")
    yield from (".SH SYNOPSIS", ".B fairlead", r"\fICOMMAND\fR [\fIOPTIONS\fR]")
    yield from (".SH DESCRIPTION", *_paragraphs(group.help or ""))
    yield ".SH COMMANDS"
    for name in group.list_commands(root):
        command = group.get_command(root, name)
        assert command is not None
        yield from _command(click.Context(command, parent=root, info_name=name), command)
    yield ".SH EXAMPLES"
    for purpose, line in EXAMPLES:
        yield from (".TP", _escaped(purpose), rf"\fB{_escaped(line)}\fR")
    yield ".SH FILES"
    for path, what in _FILES:
        yield from (".TP", f".I {_escaped(path)}", _escaped(what))
    yield from (".SH EXIT STATUS", _escaped(group.epilog or "").removeprefix("Exit codes: "))


def _command(ctx: click.Context, command: click.Command) -> Iterator[str]:
    usage = " ".join(command.collect_usage_pieces(ctx))
    yield f".SS fairlead {_escaped(ctx.info_name or '')} {_escaped(usage)}"
    yield from _paragraphs(command.help or "")
    for parameter in command.get_params(ctx):
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(ctx)):
            yield from (".TP", rf"\fB{_escaped(record[0])}\fR", _escaped(record[1]))
    if command.epilog:
        yield from (".PP", _escaped(command.epilog))


def _paragraphs(text: str) -> Iterator[str]:
    """Click's paragraphs; one that begins with a backspace on a line of its own keeps its line ends."""
    for paragraph in re.split(r"\n\s*\n", cleandoc(text)):
        lines = paragraph.splitlines()
        if lines[:1] == ["\b"]:
            yield from (".PP", ".nf", *map(_escaped, lines[1:]), ".fi")
        else:
            yield from (".PP", _escaped(" ".join(lines)))


def _escaped(text: str) -> str:
    """The text as roff prints it: a backslash, a hyphen and a leading dot or quote mean something there."""
    escaped = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


# --- the configuration, for editors ---


@click.command(epilog="Exit codes: 0 done.")
def schema() -> None:
    """Print the JSON Schema of the configuration, for editors that complete and check TOML.

    With Even Better TOML or taplo: save it beside the file and write "#:schema ./fairlead.schema.json" at its top.
    """
    import msgspec

    from agent.config.schema import schema as made

    click.echo(msgspec.json.format(msgspec.json.encode(made()), indent=2))


# --- completion, for shells ---

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
    """Completion for bash that knows words with colons, as PCI addresses have: it is told the whole line and splits it itself.

    bash takes such a word for several (COMP_WORDBREAKS), and puts what it is answered in the place of the last of them alone.
    click knows nothing of that.
    """

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
