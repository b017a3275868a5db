"""Offers a shell the names of a running daemon's devices, for the commands that take one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import click
from click.shell_completion import CompletionItem
from msgspec.structs import replace

from agent.cli import connection
from agent.console.client import Client
from agent.console.views import ENDS, Device, Status, Unclaimed
from agent.runtime.errors import FairleadError

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
        status = connection.ask(ctx.params.get("config"), Client.status, _PATIENCE)
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
