"""The group of all commands, and the options that several have; a command imports what it needs only when it runs."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from agent import __version__, cli
from agent.runtime.errors import unknown

if TYPE_CHECKING:
    from agent.runtime import logs

_COMMANDS: Final = {
    "run": "Find hardware, offer it to the kubelet, hand it to pods.",
    "discover": "Show the hardware that the configuration takes, what it leaves, and what could be offered.",
    "suggest": "Print a whole configuration for the hardware that this machine has.",
    "status": "Show what the daemon offers, how it is, who has it.",
    "devices": "Show each device of the node on a line, also what is gone or not offered.",
    "events": "Show what happened, and what happens.",
    "explain": "Show all that is known of one device.",
    "drain": "Offer a device to no new pod.",
    "undrain": "Offer a device again.",
    "reload": "Have the daemon read its configuration again.",
    "handover": "Replace the running daemon with one of the installed version, without a gap.",
    "probe": "Ask the daemon that runs here for its liveness or readiness.",
    "doctor": "Look for what is wrong with this node.",
    "validate": "Check a configuration file and say what it means.",
    "import": "Turn another plugin's configuration into Fairlead's.",
    "migrate": "Show what switching from another plugin to Fairlead means, and its steps.",
    "cdi": "Remove the CDI specifications that Fairlead has written.",
    "dra": "Print DeviceClasses, or examples of claims, for dynamic resource allocation.",
    "schema": "Print the JSON Schema of the configuration, for editors.",
    "completion": "Print a shell's completion script.",
    "manual": "Print the man page.",
    "conformance": "Try a device plugin, anybody's, beside a simulated kubelet.",
    "demo": "Run against a simulated kubelet and watch devices come and go.",
}
"""Name → its line in the help. Each is the function of that name, `import_` for `import`."""

_BESIDE: Final = {
    "run": "commands",
    "undrain": "drain",
    "handover": "reload",
    "probe": "reload",
    "completion": "manual",
    "schema": "manual",
}
"""The module of a command that has none of its own name."""

config: Final = click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The configuration; by default /etc/fairlead/config.toml, and KubeVirt's devices where that is missing.",
)
"""`config: Path | None`, as `agent.config.load` takes it."""

as_json: Final = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
"""`as_json: bool`."""


class _Lazy(click.Group):
    """Knows its commands' names and first lines without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in _COMMANDS:
            ctx.fail(unknown("command", cmd_name, _COMMANDS, most=len(_COMMANDS)))
        name = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command: click.Command = getattr(import_module(f"agent.cli.{_BESIDE.get(name, name)}"), name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        """As click does it, which takes the short --pods for what is meant by --bogus."""
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            near = get_close_matches(error.option_name, error.possibilities or (), cutoff=0.7)
            raise click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and get_close_matches(args[0], ("history",)):
            device = next((it for it in args[1:] if not it.startswith("-")), "DEVICE")
            ctx.fail(f"there is no command {args[0]!r}; did you mean `fairlead status --history {device}`?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.command(
    cls=_Lazy,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 trouble, 2 wrong usage or configuration; `doctor`: 0 all is well, 1 warnings, 2 failures.",
)
@click.version_option(__version__, message="fairlead %(version)s")
def fairlead() -> None:
    """Offer a node's hardware to Kubernetes, all kinds of it from one process."""


@click.command(epilog="Exit codes: 0 it was stopped by SIGTERM or SIGINT, 2 the configuration has mistakes.")
@config
@click.option("--log-level", type=click.Choice(cli.LEVELS), default="info", show_default=True)
def run(config: Path | None, log_level: logs.Level) -> None:
    """Find hardware, offer it to the kubelet, hand it to pods."""
    cli.run_daemon(config, log_level)
