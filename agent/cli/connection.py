"""Asks the daemon for a command: finds its socket, turns failures into sentences, and completes the names of devices."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import click
from click.shell_completion import CompletionItem
from msgspec.structs import replace

from agent.console.control import PATIENCE, Client, NoDaemonError
from agent.console.sockets import configured
from agent.console.views import ENDS, Device, Status, Unclaimed
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


# --- which device: a shell is offered the names of the daemon's ---


_PATIENCE: Final = 2.0  # seconds: a person has pressed Tab and waits


class OfAll(click.Command):
    """A command about all devices, which says how to ask about the one that it was given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does it; it alone would say that an argument is unexpected."""
        ctx.allow_extra_args = True
        super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            ctx.fail(f"{ctx.command_path} takes no device; for one device: `fairlead explain {ctx.args[0]}`")
        return ctx.args


def complete(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names that begin so, as `lookup.find` takes them; nothing where no daemon answers.

    Before anything is typed, each device has one: what its driver calls it, or else its key.
    """
    with suppress(FairleadError):
        status = ask(ctx.params.get("config"), Client.status, _PATIENCE)
        found: dict[str, dict[str, str]] = {}
        for key, names, what in _names(_undrainable(status) if ctx.info_name == "undrain" else status):
            for name in names if incomplete else names[:1]:
                if name.startswith(incomplete):
                    found.setdefault(name, {})[key] = what
        alone = ((name, next(iter(of.values()))) for name, of in found.items() if len(of) == 1)  # else it names none
        return [CompletionItem(name, help=what) for name, what in alone]
    return []


def _undrainable(status: Status) -> Status:
    """What `undrain` would end something of."""
    ended = tuple(
        replace(
            one, devices=tuple(it for it in one.devices if it.condition == "Drained" or ENDS["operator"] in it.ends)
        )
        for one in status.resources
    )
    return replace(status, resources=ended, unclaimed=tuple(it for it in status.unclaimed if it.reason == "drained"))


def _names(status: Status) -> Iterator[tuple[str, list[str], str]]:
    """Of each device its key, what it may be called, the shortest first, and what it is."""
    for resource in status.resources:
        for device in resource.devices:
            yield device.key, [*_called(device, device.key), *device.ids], f"{resource.name}, {device.state}"
    for one in status.unclaimed:
        yield one.device, [*_called(one, one.device)], one.why


def _called(it: Device | Unclaimed, key: str) -> Iterator[str]:
    if it.name and ", " not in it.name:
        yield it.name
    yield key
    yield from it.nodes
    for hardware in it.hardware:
        yield hardware
        if hardware.startswith("pci:"):
            yield hardware.removeprefix("pci:")
            if hardware.startswith("pci:0000:"):  # as `lspci` shows it
                yield hardware.removeprefix("pci:0000:")


device: Final = click.argument("device", shell_complete=complete)
"""`device: str`."""
